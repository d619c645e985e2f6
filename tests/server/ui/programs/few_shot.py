"""Few-shot: Solved cases show the form of the answer; every country is asked for over the same cases."""

import asyncio

import agentflow as af

INSTRUCTIONS = ["Italy", "Spain", "Germany", "Russia", "Poland", "Austria"]


@af.program
async def program(s: af.State) -> str:
    s += af.system("You name the capital of a country.")
    outputs: list[af.Variable] = []
    s += af.user("France")
    s += af.assistant("Paris")
    s += af.user("Japan")
    s += af.assistant("Tokyo")
    s += af.user("Egypt")
    s += af.assistant("Cairo")
    s += af.user("Peru")
    s += af.assistant("Lima")
    async with s.fork(6) as branches:
        for branch, instruction in zip(branches, INSTRUCTIONS, strict=True):
            branch += af.user(instruction)
            branch += af.assistant(af.gen("capital", max_tokens=10, stop="\n"))
            outputs.append(branch["capital"])
    return "\n".join([str(await output) for output in outputs])


async def main() -> None:
    async with af.session(seed=1) as flow:
        print(await flow.run(program))


if __name__ == "__main__":
    asyncio.run(main())
