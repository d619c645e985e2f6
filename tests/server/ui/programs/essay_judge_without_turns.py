"""Essay judge: Four judges read one essay side by side, then their words are summed up and graded."""

import asyncio

import agentflow as af

LABELS = ["clarity", "evidence", "originality", "style"]
INSTRUCTIONS = [
    "Is the essay clear and easy to follow? Give your reason in one or two sentences.",
    "Does the essay support its claims with evidence? Give your reason in one or two sentences.",
    "Does the essay have ideas of its own? Give your reason in one or two sentences.",
    "Is the essay well written? Give your reason in one or two sentences.",
]


@af.program
async def program(s: af.State) -> str:
    s += "You are a judge of school essays. You answer in plain, short sentences." + "\n\n"
    s += "Read this essay:\n\nEvery green leaf is a factory that runs on light. Chlorophyll catches a photon and hands its energy to an electron; water is split, oxygen is set free, and the energy is stored in molecules that later build sugar out of air. In our own experiment, ten bean plants behind red glass grew twice as tall as ten behind green glass, because chlorophyll reflects the green light that it cannot use. So when we call plants simple, we forget that they do each morning what no machine of ours can do: they turn sunlight into food.\n\nIs the essay about science? Answer yes or no." + "\n\n"
    s += af.select("related", ["yes", "no"]) + "\n\n"
    async with s.fork(4) as branches:
        for branch, instruction in zip(branches, INSTRUCTIONS, strict=True):
            branch += instruction + "\n\n"
            branch += af.gen("judgment", max_tokens=56, stop="\n") + "\n\n"
    found = [
        f"{label}: {branch['judgment'].strip()}\n"
        for label, branch in zip(LABELS, branches, strict=True)
    ]
    s += "Four judges wrote:\n" + "".join(found) + "Sum up their judgments in two sentences." + "\n\n"
    s += "In short, the essay" + af.gen("summary", max_tokens=72, stop="\n") + "\n\n"
    s += "Which grade does the essay deserve: A, B, C or D?" + "\n\n"
    s += "The essay deserves grade " + af.select("grade", ["A", "B", "C", "D"]) + "\n\n"
    return str(await s["grade"])


async def main() -> None:
    async with af.session(seed=1) as flow:
        print(await flow.run(program))


if __name__ == "__main__":
    asyncio.run(main())
