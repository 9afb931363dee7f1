import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvferry.models import demo_model_dir
from kvferry.results import ChatMessage
from router.chat_template import ChatTemplate
from router.errors import InvalidRequest

SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}

# Of the kinds in use, each with the Jinja features that its kind relies on.
TEMPLATES = {
    "chatml": """{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if tools %}tools{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "llama": """{{- bos_token }}
{%- if not tools is defined or tools is none %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {% if message is not mapping %}{{ raise_exception('no mapping') }}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}?{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
""",
    "namespace, break, tojson, generation": """
{% set ns = namespace(n=0) %}
{% for message in messages %}
  {% if loop.index > 9 %}{% break %}{% endif %}
  {% set ns.n = ns.n + 1 %}
  {% generation %}
  {{ message | tojson }} {{ message.content.split('x')[-1] }}
  {% endgeneration %}
{% endfor %}
{{ ns.n }} {{ strftime_now('%Y') | length }} {{ eos_token }} {{ {'<': '&é'} | tojson(indent=2) }}
""",
}

CHATS = [
    [("user", "hi")],
    [("system", " Be <brief> & 'kind'. "), ("user", "x\n\ny"), ("assistant", "é🙂"), ("user", "")],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_renders_what_transformers_renders(name, chat):
    source = TEMPLATES[name]
    [expected], _ = render_jinja_template(
        [[{"role": role, "content": content} for role, content in chat]],
        chat_template=source,
        add_generation_prompt=True,
        **SPECIAL_TOKENS,
    )
    assert ChatTemplate(source, SPECIAL_TOKENS).render([ChatMessage(*m) for m in chat]) == expected


def test_the_demo_models_template_renders_what_transformers_renders():
    if not demo_model_dir().is_dir():
        pytest.skip("the demo model is not here")
    source = (demo_model_dir() / "chat_template.jinja").read_text()
    template = ChatTemplate.load(demo_model_dir())
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        [expected], _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)
        assert template.render([ChatMessage(*m) for m in chat]) == expected


def test_a_template_that_refuses_the_messages_says_why():
    template = ChatTemplate(TEMPLATES["gemma"], SPECIAL_TOKENS)
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render([ChatMessage("user", "a"), ChatMessage("user", "b")])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
        "{{ messages[0].nothing + 1 }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_hostile_or_broken_template_only_refuses(source):
    with pytest.raises(InvalidRequest, match="messages"):
        ChatTemplate(source, {}).render([ChatMessage("user", "a" * 1000)])


def test_where_templates_are_found(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    assert ChatTemplate.load(tmp_path) is None
    config.write_text(json.dumps({"eos_token": {"content": "E"}, "bos_token": None}))
    assert ChatTemplate.load(tmp_path) is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}1"}]
    config.write_text(json.dumps({"eos_token": {"content": "E"}, "chat_template": named}))
    assert ChatTemplate.load(tmp_path).render([ChatMessage("user", "a")]) == "E1"
    config.write_text(json.dumps({"eos_token": "E", "chat_template": "{{ eos_token }}2"}))
    assert ChatTemplate.load(tmp_path).render([ChatMessage("user", "a")]) == "E2"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}3")
    assert ChatTemplate.load(tmp_path).render([ChatMessage("user", "a")]) == "E3"


def test_a_template_that_does_not_compile_is_found_at_start_up(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="no valid Jinja"):
        ChatTemplate.load(tmp_path)
