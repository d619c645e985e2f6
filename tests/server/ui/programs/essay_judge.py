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
    s += af.system("You are a judge of school essays. You answer in plain, short sentences.")
    s += af.user("Read this essay:\n\nEvery green leaf is a factory that runs on light. Chlorophyll catches a photon and hands its energy to an electron; water is split, oxygen is set free, and the energy is stored in molecules that later build sugar out of air. In our own experiment, ten bean plants behind red glass grew twice as tall as ten behind green glass, because chlorophyll reflects the green light that it cannot use. So when we call plants simple, we forget that they do each morning what no machine of ours can do: they turn sunlight into food.\n\nIs the essay about science? Answer yes or no.")
    s += af.assistant(af.select("related", ["yes", "no"]))
    async with s.fork(4) as branches:
        for branch, instruction in zip(branches, INSTRUCTIONS, strict=True):
            branch += af.user(instruction)
            branch += af.assistant(af.gen("judgment", max_tokens=56, stop="\n"))
    found = [
        f"{label}: {branch['judgment'].strip()}\n"
        for label, branch in zip(LABELS, branches, strict=True)
    ]
    s += af.user("Four judges wrote:\n", *found, "Sum up their judgments in two sentences.")
    s += af.assistant("In short, the essay", af.gen("summary", max_tokens=72, stop="\n"))
    s += af.user("Which grade does the essay deserve: A, B, C or D?")
    s += af.assistant("The essay deserves grade ", af.select("grade", ["A", "B", "C", "D"]))
    return str(await s["grade"])


async def main() -> None:
    async with af.session(seed=1) as flow:
        print(await flow.run(program))


if __name__ == "__main__":
    asyncio.run(main())
