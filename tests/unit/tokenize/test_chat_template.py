"""Chat templates: the jinja that Hugging Face templates use, the sandbox, refusals."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from inferserve.errors import ConfigError, InvalidRequest
from inferserve.tokenize.chat import ChatTemplate

MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "<é&'>"}]


def render(source: str, messages: list[dict[str, Any]] = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, variables=variables)


def test_chatml() -> None:
    source = (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    template = ChatTemplate(source)
    whole = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<é&'><|im_end|>\n"
    assert template.render(MESSAGES) == whole + "<|im_start|>assistant\n"
    assert template.render(MESSAGES, add_generation_prompt=False) == whole


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ {'a': [1, 'é<']} | tojson }}", '{"a": [1, "é<"]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% generation %}x{{ messages[0].content }}{% endgeneration %}y", "xsy"),
        ("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("  {%- if tools %}t{% else %}none{% endif %}\n", "none"),
        ("{{ messages[-1]['content'].strip() | trim | length }}", "5"),
        ("{{ enable_thinking }}", "False"),
        ("{% if messages is defined and x is not defined %}ok{% endif %}", "ok"),
    ],
)
def test_features(source: str, expected: str) -> None:
    assert render(source, enable_thinking=False) == expected


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_equals_transformers() -> None:
    """The same text as transformers renders, on a template with the features that differ between engines."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{{- bos_token }}\n{%- if tools %}\n  {{- tools | tojson }}\n{%- endif %}\n"
        "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n        {{- '[U]' + m.content | tojson }}\n"
        "    {%- else %}\n        {% generation %}{{ m.content }}{% endgeneration %}\n    {%- endif %}\n{%- endfor %}\n"
    )
    theirs, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, bos_token="<s>", add_generation_prompt=True
    )
    assert render(source) == theirs[0]


def test_refusals_carry_the_templates_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.status == 400 and caught.value.code == "chat_template_refused"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[9].content.strip() }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% include 'x' %}",
    ],
)
def test_what_fails_inside_is_a_400(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidRequest):
        render("{{ messages[0].update({'role': 'x'}) }}", messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_a_client_cannot_replace_the_messages() -> None:
    assert (
        render("{{ messages[0].content }}", messages=[{"role": "user", "content": "a"}], add_generation_prompt=1) == "a"
    )


def test_a_template_that_does_not_parse_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="chat-template"):
        ChatTemplate("{% for %}")
