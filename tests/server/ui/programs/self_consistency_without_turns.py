"""Self-consistency: Eight lines of thought are sampled from one question, then the answers are weighed."""

import asyncio

import agentflow as af

LABELS = [
    "thought 1",
    "thought 2",
    "thought 3",
    "thought 4",
    "thought 5",
    "thought 6",
    "thought 7",
    "thought 8",
]


@af.program
async def program(s: af.State) -> str:
    s += "A farmer has 17 sheep and buys 2 times 9 more. How many sheep are there now?" + "\n\n"
    async with s.fork(8) as branches:
        for branch in branches:
            branch += (
                "Let us think:"
                + af.gen("thought", max_tokens=48, stop="\n\n", temperature=0.7, top_p=0.95)
                + "\n\n"
            )
    found = [
        f"{label}: {branch['thought'].strip()}\n"
        for label, branch in zip(LABELS, branches, strict=True)
    ]
    s += "Eight pupils reasoned like this:\n" + "".join(found) + "Which number is right?" + "\n\n"
    s += (
        "The answer is"
        + af.gen("answer", max_tokens=12, stop=["\n", "."], temperature=0.7, top_p=0.95)
        + "\n\n"
    )
    return str(await s["answer"])


async def main() -> None:
    async with af.session(seed=1) as flow:
        print(await flow.run(program))


if __name__ == "__main__":
    asyncio.run(main())
