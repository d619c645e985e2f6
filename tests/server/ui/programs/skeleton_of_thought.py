"""Skeleton of thought: The points of an answer come first; then all of them are explained at the same time."""

import asyncio

import agentflow as af

LABELS = ["light", "noise", "food"]


@af.program
async def program(s: af.State) -> str:
    s += af.system("You give good advice.")
    s += af.user("How can I sleep better? Give a short tip about light.")
    s += af.assistant("Keep the bedroom", af.gen("light", max_tokens=16, stop=["\n", "."]))
    s += af.user("Give a short tip about noise.")
    s += af.assistant("Use", af.gen("noise", max_tokens=16, stop=["\n", "."]))
    s += af.user("Give a short tip about food.")
    s += af.assistant("Do not eat", af.gen("food", max_tokens=16, stop=["\n", "."]))
    instructions = [
        f"Explain in one sentence: Keep the bedroom {s['light'].strip()}",
        f"Explain in one sentence: Use {s['noise'].strip()}",
        f"Explain in one sentence: Do not eat {s['food'].strip()}",
    ]
    async with s.fork(3) as branches:
        for branch, instruction in zip(branches, instructions, strict=True):
            branch += af.user(instruction)
            branch += af.assistant("This helps because", af.gen("paragraph", max_tokens=40, stop="\n"))
    found = [
        f"{label}: {branch['paragraph'].strip()}\n"
        for label, branch in zip(LABELS, branches, strict=True)
    ]
    s += af.user("These are the explanations:\n", *found, "Put them into one friendly paragraph.")
    s += af.assistant("To sleep better,", af.gen("advice", max_tokens=96, stop="\n\n"))
    return str(await s["advice"])


async def main() -> None:
    async with af.session(seed=1) as flow:
        print(await flow.run(program))


if __name__ == "__main__":
    asyncio.run(main())
