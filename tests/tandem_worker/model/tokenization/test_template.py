"""Prompts are those that transformers renders, for templates of well-known kinds and for what clients send to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.model.tokenization.template import choose_template, render_chat

from tests.tandem_worker.server.conftest import TEMPLATE as TOOLS
from tests.tandem_worker.server.test_harmony_api import TEMPLATE as HARMONY

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """
{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] | trim %}
{% else %}
    {% set loop_messages = messages %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message %}
    {{ bos_token + '[INST] <<SYS>>' + system_message + '<</SYS>>' + message['content'].strip() + ' [/INST]' }}
    {% elif message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' -}}
    {% else %}
        {{- ' ' + message['content'].strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}"""
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y")[:2] %}{%- endif %}
{%- if tools is not none and tools %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\n" }}
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) }}{{- "\n" }}{%- endfor %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '<|end_header_id|>\n\n' }}{{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at once") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- else %}
        {{- message.content | tojson if message.content is iterable else message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
THINKING = """
{%- set ns = namespace(last=-1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = index %}{%- set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}
        {%- generation %}{{- content }}{% endgeneration %}{{- '<|im_end|>\n' }}
    {%- else %}
        {%- if message.content is not string %}{%- continue %}{%- endif %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
RETRIEVAL = """{% for document in documents %}
Document {{ loop.index }}: {{ document.title | default('untitled') }} {{ document | tojson(sort_keys=true) }}
{% endfor %}{% for m in messages %}
    {# a comment #}
    {{ m.content }} {{ dict(a=1, b=m.role) | tojson(separators=(',', ':')) }} {{ dict.fromkeys('ab', 1) | tojson }}
    {%- if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
"""
TEMPLATES = {
    "chatml": CHATML, "llama 2": LLAMA2, "llama 3": LLAMA3, "thinking": THINKING, "retrieval": RETRIEVAL,
    "tools": TOOLS, "harmony": HARMONY,
}  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"x": 1, "é": "<&>'\""}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}}}
TEXT = st.sampled_from(["", "hi", " two  words \n", "<think>a</think>\nb", "é<&>\"'", "{{ 1 }}", "日本"])


def oracle(template: str, messages: Any, **options: Any) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options))


def ours(template: str, messages: Any, **options: Any) -> str:
    values: dict[str, Any] = SPECIAL | options
    return render_chat(template, messages, **values)


def outcome(render: Callable[..., str], *values: Any, **options: Any) -> tuple[str, str]:
    try:
        return "text", render(*values, **options)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        # Sentences about what Jinja did are Jinja's.
        return "refused", str(error) if isinstance(error, jinja2.TemplateError) else ""


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={
        "content": st.one_of(TEXT, TEXT, st.none(), st.just([{"type": "text", "text": "part "}])),
        "reasoning_content": st.one_of(TEXT, st.none()),
        "thinking": TEXT,
        "reasoning": TEXT,
        "tool_calls": st.sampled_from([[CALL], [CALL, CALL], None]),
        "name": TEXT,
    },
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.sampled_from([None, [TOOL], [TOOL, TOOL]]),
        "documents": st.sampled_from([None, [{"title": "t", "text": "x"}, {"text": "é"}]]),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "enable_thinking": st.booleans(),
        "date_string": TEXT,
        "bos_token": st.just("<other>"),
        "reasoning_effort": st.just("low"),
    },
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=st.lists(MESSAGE, max_size=4), options=OPTIONS)
def test_any_conversation(name: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    found = outcome(ours, TEMPLATES[name], messages, **options)
    assert found == outcome(oracle, TEMPLATES[name], messages, **options)


PROGRAMS = [
    "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}",
    "{{ messages[0].pop('role') }}", "{{ cycler.__init__.__globals__ }}", "{{ namespace(_a=1) }}",
    "{% set ns = namespace(a=1, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.b }}",
    "{% set ns = namespace(a=1) %}{% set ns._a = 3 %}", "{% set ns = namespace({'x': 1}) %}{{ ns.x }}",
    "{{ dict.__class__ }}", "{{ dict(messages[0]) }}", "{{ dict([('a', 1)]) }}", "{{ raise_exception('no') }}",
    "{% for", "{{ undefined.x }}", "{{ 1 // 0 }}", "{{ range(100000) | list | length }}", "{{ range(1000000) }}",
    "{{ messages | tojson }}", "{{ messages | map(attribute='role') | join(',') }}", "{{ 'a\nb' | indent(2) }}",
    "{{ '%s' % 5 }}", "{{ '{0.__class__}'.format(1) }}", "{{ messages[0].items() | list }}", "a{# x #}b\n",
    "  {% if true %}\n  x\n  {% endif %}\n", "{{ bos_token }}|{{ unk_token }}",
    "{{ 'é<' | tojson(ensure_ascii=true) }}",
    "{% generation %}{% set a = 1 %}{% endgeneration %}{{ a is defined }}", "{% call(x) f() %}{% endcall %}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].role) }}", "{% include 'x' %}", "{{ lipsum }}",
    "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_programs_may_do(program: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    found = outcome(ours, program, messages)
    expected = outcome(oracle, program, messages)
    assert found[0] == expected[0]
    if "namespace" not in program or found[0] == "text":  # that refusal has a sentence of its own
        assert found == expected or "lipsum" in program
    assert messages == [{"role": "user", "content": "x"}]


def test_a_template_leaves_nothing_behind() -> None:
    messages = [{"role": "user", "content": "x"}]
    ours("{% set bos_token = 'changed' %}{% set messages = [] %}", messages)
    assert ours("{{ bos_token }}{{ messages | length }}", messages) == "<s>1"


@pytest.mark.parametrize("name", ["template", "variables", "compiled", "chat_template", "conversation"])
def test_variables_may_have_any_name(name: str) -> None:
    values: dict[str, Any] = {name: "v"}
    assert render_chat(f"{{{{ {name} }}}}", [{"role": "user"}], **values) == "v"


SEVERAL = {"default": "d", "tool_use": "t", "rag": "r"}


@pytest.mark.parametrize("source", [SEVERAL, {"default": "d"}, {"tool_use": "t"}, {"rag": "r"}, "own", None])
@pytest.mark.parametrize("given_template", [None, "rag", "{{ 1 }}"])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_which_template(source: Any, given_template: str | None, tools: Any) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=source)
    try:
        expected: str | None = theirs.get_chat_template(given_template, tools)
    except ValueError:
        expected = None
    try:
        found: str | None = choose_template(source, given_template, tools=tools is not None)
    except ValueError:
        found = None
    assert found == expected
