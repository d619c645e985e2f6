"""Skeleton of thought: The points of an answer come first; then all of them are explained at the same time."""

import asyncio

import agentflow as af

LABELS = ["light", "noise", "food"]


@af.program
async def program(s: af.State) -> str:
    s += "You give good advice." + "\n\n"
    s += "How can I sleep better? Give a short tip about light." + "\n\n"
    s += "Keep the bedroom" + af.gen("light", max_tokens=16, stop=["\n", "."]) + "\n\n"
    s += "Give a short tip about noise." + "\n\n"
    s += "Use" + af.gen("noise", max_tokens=16, stop=["\n", "."]) + "\n\n"
    s += "Give a short tip about food." + "\n\n"
    s += "Do not eat" + af.gen("food", max_tokens=16, stop=["\n", "."]) + "\n\n"
    instructions = [
        f"Explain in one sentence: Keep the bedroom {s['light'].strip()}",
        f"Explain in one sentence: Use {s['noise'].strip()}",
        f"Explain in one sentence: Do not eat {s['food'].strip()}",
    ]
    async with s.fork(3) as branches:
        for branch, instruction in zip(branches, instructions, strict=True):
            branch += instruction + "\n\n"
            branch += "This helps because" + af.gen("paragraph", max_tokens=40, stop="\n") + "\n\n"
    found = [
        f"{label}: {branch['paragraph'].strip()}\n"
        for label, branch in zip(LABELS, branches, strict=True)
    ]
    s += (
        "These are the explanations:\n"
        + "".join(found)
        + "Put them into one friendly paragraph."
        + "\n\n"
    )
    s += "To sleep better," + af.gen("advice", max_tokens=96, stop="\n\n") + "\n\n"
    return str(await s["advice"])


async def main() -> None:
    async with af.session(seed=1) as flow:
        print(await flow.run(program))


if __name__ == "__main__":
    asyncio.run(main())
