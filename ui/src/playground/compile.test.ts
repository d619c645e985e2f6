import { image } from "agentflow-client";
import { describe, expect, test } from "vitest";
import type { ShownImage } from "../images/picture";
import { callsOf, compile, promptLengths } from "./compile";
import { EXAMPLES } from "./examples";
import { allImages, DEFAULT_SAMPLING, gen, mistakesOf, say, select, type Program } from "./program";

const program = (steps: Program["steps"], changes: Partial<Program> = {}): Program => ({
  title: "a test",
  about: "",
  system: "",
  user: "Go.",
  steps,
  sampling: DEFAULT_SAMPLING,
  ...changes,
});

const fork = (labels: string[], steps: Program["steps"]): Program["steps"][number] => ({
  kind: "fork",
  branches: labels.map((label) => ({ label, instruction: `About ${label}.` })),
  steps,
});

const opsOf = (made: Program, options = {}) => compile(made, options).graph.ops;
const textsOf = (made: Program, options = {}) =>
  opsOf(made, options).flatMap((op) => (op.op === "text" ? [op.parts] : []));

const shown = (name: string, source = name): ShownImage => ({ source, name, width: 2, height: 2, thumbnail: "" });

test("images stand before the text of a turn of the user, also without text", async () => {
  const dot = await image(Uint8Array.of(0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a));
  const step = { ...say("And this?"), images: [shown("dot", dot.source)] };
  const made = program([step, fork(["a"], [step, gen("answer")])], { user: "", images: [shown("dot", dot.source)] });
  const { graph, root } = compile(made, { imageOf: (source) => (source === dot.source ? dot : undefined) });
  expect(graph.ops.map(({ op }) => op).slice(0, 8)).toEqual(["open", "begin", "image", "end", "begin", "image", "text", "end"]);
  expect(graph.ops.filter(({ op }) => op === "image").length).toBe(3);
  expect(root.items[0]).toMatchObject({ kind: "turn", role: "user", text: [], images: [{ name: "dot" }] });
  expect(allImages(made).length).toBe(3);
  expect(mistakesOf(made)).toEqual([]);
  const isOther = { ...step, role: "assistant" as const, text: "" };
  expect(mistakesOf(program([isOther, say("x"), gen("answer")]))).toEqual(["Step 1 has no text."]);
});

describe("a program becomes a graph", () => {
  test("turns are begun and ended, and a gen stands in the assistant's turn after what it begins with", () => {
    const ops = opsOf(program([gen("answer", { lead: "Well,", maxTokens: 7, stop: ["\n"] })], { system: "Be kind." }));
    expect(ops.map((op) => ("role" in op ? `${op.op} ${op.role}` : op.op))).toEqual([
      "open",
      "begin system",
      "text",
      "end",
      "begin user",
      "text",
      "end",
      "begin assistant",
      "text",
      "read",
      "gen",
      "end",
    ]);
    expect(ops.find((op) => op.op === "gen")).toMatchObject({ name: "answer", params: { max_tokens: 7, stop: ["\n"] } });
    expect(ops.find((op) => op.op === "read")).toMatchObject({ what: "tokens" });
  });

  test("each branch gets its instruction and the same steps, in states of its own", () => {
    const { root } = compile(program([fork(["a", "b", "c"], [gen("thought"), say("Good?"), select("verdict", ["y", "n"])])]));
    const calls = [...callsOf(root)];
    expect(calls.map(({ call }) => call.key)).toEqual(["0:0", "0:2", "1:0", "1:2", "2:0", "2:2"]);
    expect(new Set(calls.map(({ lane }) => lane.state.number)).size).toBe(3);
  });

  test("forks nest, and their paths name the way", () => {
    const { root } = compile(program([fork(["a", "b"], [gen("one"), fork(["x", "y"], [gen("two")])])]));
    expect([...callsOf(root)].map(({ lane }) => lane.path)).toEqual(["0", "0.0", "0.1", "1", "1.0", "1.1"]);
  });

  test("a join refers to the last value of each branch", () => {
    const made = program([
      fork(["a", "b"], [gen("thought")]),
      { kind: "join", before: "They said:", after: "Sum up." },
      gen("sum"),
    ]);
    const gens = opsOf(made).filter((op) => op.op === "gen");
    const strip = { op: "ref", transforms: [["strip"]] };
    expect(textsOf(made).at(-1)).toEqual([
      "They said:",
      "\n",
      "a: ",
      { ...strip, var: gens[0]!.var },
      "\n",
      "b: ",
      { ...strip, var: gens[1]!.var },
      "\n",
      "Sum up.",
    ]);
  });

  test("a name in braces refers to an earlier variable; other braces are text", () => {
    const made = program([gen("tip"), say('Explain {tip} as {"json": {later}}.'), gen("later")]);
    const [tip] = opsOf(made).filter((op) => op.op === "gen");
    expect(textsOf(made).at(-1)).toEqual([
      "Explain ",
      { op: "ref", var: tip!.var, transforms: [["strip"]] },
      ' as {"json": {later}}.',
    ]);
  });

  test("the program's sampling holds where a gen says nothing; at temperature 0 nothing is sampled", () => {
    const steps = [gen("a"), say("And?"), gen("b", { maxTokens: 3 })];
    const params = (sampling: Program["sampling"]) =>
      opsOf(program(steps, { sampling })).flatMap((op) => (op.op === "gen" ? [op.params] : []));
    expect(params({ temperature: 0.5, topP: 0.9, maxTokens: 20, seed: 3 })).toEqual([
      { max_tokens: 20, temperature: 0.5, top_p: 0.9 },
      { max_tokens: 3, temperature: 0.5, top_p: 0.9 },
    ]);
    expect(params({ temperature: 0, topP: 0.9, maxTokens: 20, seed: 3 })[0]).toEqual({ max_tokens: 20 });
  });

  test("schemas and patterns constrain a gen", () => {
    const shapes = [
      gen("a", { shape: { kind: "schema", source: '{"type": "object"}' } }),
      say("And?"),
      gen("b", { shape: { kind: "regex", source: "[0-9]+" } }),
    ];
    const kinds = opsOf(program(shapes)).flatMap((op) => (op.op === "gen" ? [op.constraint?.kind] : []));
    expect(kinds).toEqual(["schema", "regex"]);
  });

  test("what is known is written out, and a branch that was cancelled is left out of the fork and the join", () => {
    const made = program([
      fork(["a", "b", "c"], [gen("thought")]),
      { kind: "join", before: "", after: "" },
      gen("sum"),
    ]);
    const options = { known: new Map([["0:0", " It is so. "]]), without: new Set(["1"]) };
    const ops = opsOf(made, options);
    expect(ops.find((op) => op.op === "fork")).toMatchObject({ children: { length: 2 } });
    expect(ops.filter((op) => op.op === "gen").map((op) => op.name)).toEqual(["thought", "sum"]);
    const joined = textsOf(made, options).at(-1)!;
    expect(joined.filter((part) => typeof part === "string")).toEqual(["a: ", "It is so.", "\n", "c: ", "\n"]);
    expect([...callsOf(compile(made, options).root)].map(({ call }) => call.key)).toEqual(["0:0", "2:0", ":2"]);
  });

  test("the stage shows values where the prompt has them", () => {
    const steps = [gen("tip"), say("Explain {tip} and {later}."), gen("later", { lead: "{tip}:" })];
    const { root } = compile(program(steps));
    const tip = { name: "tip", key: ":0" };
    expect(root.items[2]).toMatchObject({ kind: "turn", text: ["Explain ", tip, " and {later}."] });
    expect(root.items[3]).toMatchObject({ kind: "gen", lead: [tip, ":"] });
  });

  test("prompts grow with the texts of the calls above them", () => {
    const { root } = compile(program([gen("a"), fork(["x", "y"], [gen("b")]), { kind: "join", before: "", after: "" }, gen("c")]));
    const texts = new Map([[":0", "12345"], ["0:0", "1"]]);
    const lengths = new Map(promptLengths(root, (key) => texts.get(key) ?? ""));
    expect(lengths).toEqual(new Map([[":0", 3], ["0:0", 16], ["1:0", 16], [":3", 11]]));
  });

  test("a wide fork does not read the tokens of its prompts", () => {
    const labels = Array.from({ length: 40 }, (_, index) => `${index}`);
    expect(opsOf(program([fork(labels, [gen("a")])])).filter((op) => op.op === "read")).toEqual([]);
  });
});

describe("mistakes are found before anything runs", () => {
  test.each(Object.entries(EXAMPLES))("%s has none", (_, example) => {
    expect(mistakesOf(example)).toEqual([]);
    expect(compile(example).graph.variables.length).toBeGreaterThan(1);
  });

  test.each<[string, Program["steps"]]>([
    ["nothing is generated", [say("Hello.")]],
    ["a name that is no name", [gen("two words")]],
    ["a name twice", [gen("a"), say("And?"), gen("a")]],
    ["a gen after the assistant's turn", [gen("a"), gen("b")]],
    ["one choice", [select("a", ["yes", ""])]],
    ["a choice twice", [select("a", ["yes", "yes"])]],
    ["a schema that is none", [gen("a", { shape: { kind: "schema", source: "[1" } })]],
    ["a join of nothing", [gen("a"), { kind: "join", before: "", after: "" }]],
    ["branches that generate nothing", [fork(["a"], [say("Hm.")])]],
    ["an empty turn", [gen("a"), say(" ")]],
  ])("%s", (_, steps) => {
    expect(mistakesOf(program(steps))).toHaveLength(1);
  });
});
