"""The scripted model that the blocks of the documentation run on."""

from __future__ import annotations

import agentflow as af

ESSAY = "Every green leaf is a factory that runs on light."

SCRIPT: dict[str, str | af.Reply] = {
    "": "It is short and clear.",
    "Is it about science?</user><assistant>": "yes",
    "its clarity.</user><assistant>": "The sentences are short.",
    "its evidence.</user><assistant>": "It names no source.",
    "Sum that up.</user><assistant>": "Clear, but without evidence.",
    "What do plants do?</user><assistant>": "Plants turn light into sugar.",
    "What do plants live on?</user><assistant>": "Light, water and air. They need no more.",
    "Which of these is the most important?</user><assistant>": "Light.",
    "plants live on</user><assistant>": "light\nwater\nair",
    "as JSON.</user><assistant>": '{"title": "Leaves", "scores": [8, 3]}',
    "List what is wrong with the essay.</user><assistant>": (
        '[{"text": "The second paragraph has no evidence.", "severity": 3}]'
    ),
    "answer first? Why are leaves green?</user><assistant>": (
        '["What do plants live on?", "What do plants do?"]'
    ),
    "Write a report.</user><assistant>": '{"summary": "Clear, without evidence.", "score": 7}',
    "How large is a whale?</user><assistant>": '"large"',
    "How many legs has a spider?</user><assistant>": "8",
    "Do I need an umbrella in Oslo?</user><assistant>": (
        'I will look it up.<look up>{"city": "Oslo"}</look up>'
    ),
    "Is it raining in Rome?</user><assistant>": af.Reply(
        "", (af.ToolCall("weather", {"city": "Rome"}, "call_1"),)
    ),
    "rain in Rome</tool><assistant>": "Yes, it is.",
    "Will it rain in Rome or in Turin?</user><assistant>": af.Reply(
        "", (af.ToolCall("weather", {"city": "Rome"}), af.ToolCall("weather", {"city": "Turin"}))
    ),
    "rain in Turin</tool><assistant>": "In both.",
    "How many legs have two spiders?</user><assistant>": "16",
    "Is it raining in Lima?</user><assistant>": af.Reply("", (af.ToolCall("weather", {"city": "Lima"}),)),
    "only Europe is covered</tool><assistant>": "I cannot tell.",
    "Do both prompts ask for the same?</user><assistant>": "yes",
    "first paragraph: ": "Leaves catch light.",
    "second paragraph: ": "Roots bring water.",
    # concepts/models.md
    "Write one sentence on leaves.</user><assistant>": "Leaves catch light.",
    "Is that true? Leaves catch light.</user><assistant>": "yes",
    "Write it again, better.</user><assistant>": "Leaves catch light and make sugar.",
    "Who was Ada Lovelace? Answer as Name and Job.</user><assistant>": "Name: Ada\nJob: mathematician",
    # guides/coming-from.md and the README
    "its clarity in one sentence.</user><assistant>": "The sentences are short.",
    "its evidence in one sentence.</user><assistant>": "It names no source.",
    "And animals?</user><assistant>": "Plants, or each other.",
}
"""The model's answer to a prompt with this end. The longest end counts."""
