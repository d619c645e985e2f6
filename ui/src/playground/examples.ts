// Ready programs, after the ideas of the examples in the folder examples/.
import { DEFAULT_SAMPLING, gen, say, select, type Program } from "./program";

const ESSAY =
  "Every green leaf is a factory that runs on light. Chlorophyll catches a photon and hands its energy to an " +
  "electron; water is split, oxygen is set free, and the energy is stored in molecules that later build sugar " +
  "out of air. In our own experiment, ten bean plants behind red glass grew twice as tall as ten behind green " +
  "glass, because chlorophyll reflects the green light that it cannot use. So when we call plants simple, we " +
  "forget that they do each morning what no machine of ours can do: they turn sunlight into food.";

const CASES = [
  ["France", "Paris"],
  ["Japan", "Tokyo"],
  ["Egypt", "Cairo"],
  ["Peru", "Lima"],
] as const;

const PERSON = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 40 },
    born: { type: "integer" },
    field: { enum: ["physics", "chemistry", "mathematics", "other"] },
    prizes: {
      type: "array",
      maxItems: 2,
      items: {
        type: "object",
        properties: { name: { type: "string", maxLength: 40 }, year: { type: "integer" } },
        required: ["name", "year"],
        additionalProperties: false,
      },
    },
  },
  required: ["name", "born", "field", "prizes"],
  additionalProperties: false,
};

export const EXAMPLES: Readonly<Record<string, Program>> = {
  essay_judge: {
    title: "Essay judge",
    about: "Four judges read one essay side by side, then their words are summed up and graded.",
    system: "You are a judge of school essays. You answer in plain, short sentences.",
    user: `Read this essay:\n\n${ESSAY}\n\nIs the essay about science? Answer yes or no.`,
    steps: [
      select("related", ["yes", "no"]),
      {
        kind: "fork",
        branches: [
          { label: "clarity", instruction: "Is the essay clear and easy to follow? Give your reason in one or two sentences." },
          { label: "evidence", instruction: "Does the essay support its claims with evidence? Give your reason in one or two sentences." },
          { label: "originality", instruction: "Does the essay have ideas of its own? Give your reason in one or two sentences." },
          { label: "style", instruction: "Is the essay well written? Give your reason in one or two sentences." },
        ],
        steps: [gen("judgment", { maxTokens: 56, stop: ["\n"] })],
      },
      { kind: "join", before: "Four judges wrote:", after: "Sum up their judgments in two sentences." },
      gen("summary", { lead: "In short, the essay", maxTokens: 72, stop: ["\n"] }),
      say("Which grade does the essay deserve: A, B, C or D?"),
      select("grade", ["A", "B", "C", "D"], "The essay deserves grade "),
    ],
    sampling: DEFAULT_SAMPLING,
  },
  few_shot: {
    title: "Few-shot",
    about: "Solved cases show the form of the answer; every country is asked for over the same cases.",
    system: "You name the capital of a country.",
    user: "",
    steps: [
      ...CASES.flatMap(([country, capital]) => [say(country), say(capital, "assistant")]),
      {
        kind: "fork",
        branches: ["Italy", "Spain", "Germany", "Russia", "Poland", "Austria"].map((country) => ({
          label: country,
          instruction: country,
        })),
        steps: [gen("capital", { maxTokens: 10, stop: ["\n"] })],
      },
    ],
    sampling: DEFAULT_SAMPLING,
  },
  self_consistency: {
    title: "Self-consistency",
    about: "Eight lines of thought are sampled from one question, then the answers are weighed.",
    system: "",
    user: "A farmer has 17 sheep and buys 2 times 9 more. How many sheep are there now?",
    steps: [
      {
        kind: "fork",
        branches: Array.from({ length: 8 }, (_, index) => ({ label: `thought ${index + 1}`, instruction: "" })),
        steps: [gen("thought", { lead: "Let us think:", maxTokens: 48, stop: ["\n\n"] })],
      },
      { kind: "join", before: "Eight pupils reasoned like this:", after: "Which number is right?" },
      gen("answer", { lead: "The answer is", maxTokens: 12, stop: ["\n", "."] }),
    ],
    sampling: { temperature: 0.7, topP: 0.95, maxTokens: 96, seed: 1 },
  },
  tree_of_thought: {
    title: "Tree of thought",
    about: "Each beginning of a story is continued in two ways, and every thought is judged.",
    system: "",
    user: "Write a short story for children about a fox who finds a lost key.",
    steps: [
      {
        kind: "fork",
        branches: [
          { label: "snow", instruction: "Begin in the snow, with one sentence." },
          { label: "river", instruction: "Begin by the river, with one sentence." },
          { label: "night", instruction: "Begin at night, with one sentence." },
        ],
        steps: [
          gen("beginning", { maxTokens: 32, stop: ["\n"] }),
          {
            kind: "fork",
            branches: [
              { label: "funny", instruction: "Go on in a funny way, with one sentence." },
              { label: "tense", instruction: "Go on in a tense way, with one sentence." },
            ],
            steps: [
              gen("thought", { maxTokens: 32, stop: ["\n"] }),
              say("Is the last sentence of this story good or bad?"),
              select("verdict", ["good", "bad"]),
            ],
          },
        ],
      },
    ],
    sampling: { temperature: 0.9, topP: 0.95, maxTokens: 64, seed: 1 },
  },
  skeleton_of_thought: {
    title: "Skeleton of thought",
    about: "The points of an answer come first; then all of them are explained at the same time.",
    system: "You give good advice.",
    user: "How can I sleep better? Give a short tip about light.",
    steps: [
      gen("light", { lead: "Keep the bedroom", maxTokens: 16, stop: ["\n", "."] }),
      say("Give a short tip about noise."),
      gen("noise", { lead: "Use", maxTokens: 16, stop: ["\n", "."] }),
      say("Give a short tip about food."),
      gen("food", { lead: "Do not eat", maxTokens: 16, stop: ["\n", "."] }),
      {
        kind: "fork",
        branches: [
          { label: "light", instruction: "Explain in one sentence: Keep the bedroom {light}" },
          { label: "noise", instruction: "Explain in one sentence: Use {noise}" },
          { label: "food", instruction: "Explain in one sentence: Do not eat {food}" },
        ],
        steps: [gen("paragraph", { lead: "This helps because", maxTokens: 40, stop: ["\n"] })],
      },
      { kind: "join", before: "These are the explanations:", after: "Put them into one friendly paragraph." },
      gen("advice", { lead: "To sleep better,", maxTokens: 96, stop: ["\n\n"] }),
    ],
    sampling: DEFAULT_SAMPLING,
  },
  extraction: {
    title: "Typed extraction",
    about: "Three texts become records of one schema; what the schema leaves no choice about is not sampled.",
    system: "You fill in records about people.",
    user: "The record has the person's name, year of birth, field and prizes.",
    steps: [
      say("Send me the texts.", "assistant"),
      {
        kind: "fork",
        branches: [
          { label: "Curie", instruction: "Marie Curie was born in 1867. She received the Nobel Prize in Physics in 1903 and the one in Chemistry in 1911." },
          { label: "Noether", instruction: "Emmy Noether, born in 1882, changed algebra. In 1932 she received the Ackermann–Teubner Memorial Award." },
          { label: "Hodgkin", instruction: "Dorothy Hodgkin, born in 1910, found the structure of penicillin, and got the Nobel Prize in Chemistry in 1964." },
        ],
        steps: [gen("person", { maxTokens: 140, shape: { kind: "schema", source: JSON.stringify(PERSON, null, 2) } })],
      },
    ],
    sampling: DEFAULT_SAMPLING,
  },
};
