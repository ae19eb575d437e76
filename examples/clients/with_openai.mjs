// The openai package for JavaScript: chats, structured output and tools, and the Responses API.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.TANDEM_URL + "/v1", apiKey: "unused" });
const question = "What is the capital of France? Answer in one sentence.";
const messages = [{ role: "user", content: question }];
const settings = { model: "smollm2", temperature: 0 };

// Plain
const answer = await client.chat.completions.create({ ...settings, messages });
console.log("plain:", answer.choices[0].message.content);

// Streamed
const pieces = [];
for await (const chunk of await client.chat.completions.create({ ...settings, messages, stream: true })) {
  pieces.push(chunk.choices[0]?.delta.content ?? "");
}
console.log("streamed:", pieces.join("|"));

// Structured
const City = z.object({ name: z.string(), country: z.string() });
const parsed = await client.chat.completions.parse({
  ...settings,
  messages,
  response_format: zodResponseFormat(City, "city"),
});
console.log("structured:", JSON.stringify(parsed.choices[0].message.parsed));

// Tools
const asked = [{ role: "user", content: "What is the weather in Paris?" }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the current weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const called = await client.chat.completions.create({ ...settings, messages: asked, tools, tool_choice: "required" });
const call = called.choices[0].message.tool_calls[0].function;
console.log("tool:", call.name, call.arguments);

// A free choice of tools needs a model whose chat template has a place for them
try {
  const free = await client.chat.completions.create({ ...settings, messages: asked, tools });
  console.log("free choice:", JSON.stringify(free.choices[0].message));
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  console.log("free choice:", error.error.message);
}

// The Responses API
const response = await client.responses.create({ ...settings, input: question });
console.log("responses plain:", response.output_text);
const deltas = [];
for await (const event of await client.responses.create({ ...settings, input: question, stream: true })) {
  if (event.type === "response.output_text.delta") deltas.push(event.delta);
}
console.log("responses streamed:", deltas.join("|"));
