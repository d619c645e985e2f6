"""Tree of thought: Each beginning of a story is continued in two ways, and every thought is judged."""

import asyncio

import agentflow as af

INSTRUCTIONS = [
    "Begin in the snow, with one sentence.",
    "Begin by the river, with one sentence.",
    "Begin at night, with one sentence.",
]
INSTRUCTIONS2 = [
    "Go on in a funny way, with one sentence.",
    "Go on in a tense way, with one sentence.",
]


@af.program
async def program(s: af.State) -> str:
    s += af.user("Write a short story for children about a fox who finds a lost key.")
    outputs: list[af.Variable] = []
    async with s.fork(3) as branches:
        for branch, instruction in zip(branches, INSTRUCTIONS, strict=True):
            branch += af.user(instruction)
            branch += af.assistant(af.gen("beginning", max_tokens=32, stop="\n", temperature=0.9, top_p=0.95))
            async with branch.fork(2) as branches2:
                for branch2, instruction in zip(branches2, INSTRUCTIONS2, strict=True):
                    branch2 += af.user(instruction)
                    branch2 += af.assistant(af.gen("thought", max_tokens=32, stop="\n", temperature=0.9, top_p=0.95))
                    branch2 += af.user("Is the last sentence of this story good or bad?")
                    branch2 += af.assistant(af.select("verdict", ["good", "bad"]))
                    outputs.append(branch2["verdict"])
    return "\n".join([str(await output) for output in outputs])


async def main() -> None:
    async with af.session(seed=1) as flow:
        print(await flow.run(program))


if __name__ == "__main__":
    asyncio.run(main())
