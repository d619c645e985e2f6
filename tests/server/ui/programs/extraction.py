"""Typed extraction: Three texts become records of one schema; what the schema leaves no choice about is not sampled."""

import asyncio

import agentflow as af

INSTRUCTIONS = [
    "Marie Curie was born in 1867. She received the Nobel Prize in Physics in 1903 and the one in Chemistry in 1911.",
    "Emmy Noether, born in 1882, changed algebra. In 1932 she received the Ackermann–Teubner Memorial Award.",
    "Dorothy Hodgkin, born in 1910, found the structure of penicillin, and got the Nobel Prize in Chemistry in 1964.",
]
PERSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "integer"},
        "field": {"enum": ["physics", "chemistry", "mathematics", "other"]},
        "prizes": {
            "type": "array",
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "year": {"type": "integer"},
                },
                "required": ["name", "year"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "born", "field", "prizes"],
    "additionalProperties": False,
}


@af.program
async def program(s: af.State) -> str:
    s += af.system("You fill in records about people.")
    s += af.user("The record has the person's name, year of birth, field and prizes.")
    outputs: list[af.Variable] = []
    s += af.assistant("Send me the texts.")
    async with s.fork(3) as branches:
        for branch, instruction in zip(branches, INSTRUCTIONS, strict=True):
            branch += af.user(instruction)
            branch += af.assistant(af.gen("person", max_tokens=140, schema=PERSON_SCHEMA))
            outputs.append(branch["person"])
    return "\n".join([str(await output) for output in outputs])


async def main() -> None:
    async with af.session(seed=1) as flow:
        print(await flow.run(program))


if __name__ == "__main__":
    asyncio.run(main())
