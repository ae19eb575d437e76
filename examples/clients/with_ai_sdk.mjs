// The AI SDK, with its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const tandem = createOpenAICompatible({
  name: "tandem",
  baseURL: process.env.TANDEM_URL + "/v1",
  supportsStructuredOutputs: true,
});
const settings = { model: tandem("smollm2"), temperature: 0 };
const prompt = "What is the capital of France? Answer in one sentence.";

// Plain
const { text } = await generateText({ ...settings, prompt });
console.log("plain:", text);

// Streamed
const pieces = [];
for await (const piece of streamText({ ...settings, prompt }).textStream) pieces.push(piece);
console.log("streamed:", pieces.join("|"));

// Structured
const schema = z.object({ name: z.string(), country: z.string() });
const { output } = await generateText({ ...settings, prompt, output: Output.object({ schema }) });
console.log("structured:", JSON.stringify(output));

// Tools
const getWeather = tool({
  description: "Get the current weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});
const asked = { ...settings, prompt: "What is the weather in Paris?", tools: { getWeather } };
const { toolCalls, toolResults } = await generateText({ ...asked, toolChoice: "required" });
console.log("tool:", toolCalls[0].toolName, JSON.stringify(toolCalls[0].input));
console.log("tool result:", toolResults[0].output);

// A free choice of tools needs a model whose chat template has a place for them
try {
  console.log("free choice:", (await generateText(asked)).text);
} catch (error) {
  if (!APICallError.isInstance(error)) throw error;
  console.log("free choice:", error.message);
}
