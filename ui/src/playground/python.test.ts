// The Python sources and the graphs of the examples are kept in tests/server/ui/programs, where a test in Python runs
// both and compares their prompts.
import type { Graph } from "agentflow-client";
import { expect, test } from "vitest";
import { compile } from "./compile";
import { EXAMPLES } from "./examples";
import { DEFAULT_SAMPLING, gen, type Program } from "./program";
import { text, toPython } from "./python";

/** A graph as JSON, an op a line, without what its values are read with. */
function lines(graph: Graph): string {
  const { ops, places } = graph.submission(1, [], { seed: 1 });
  const written = ops.filter((op) => op.op !== "read").map((op) => JSON.stringify(op));
  return `{"ops":[\n${written.join(",\n")}\n],"places":${JSON.stringify(places)}}\n`;
}

test.each(Object.entries(EXAMPLES))("the source of %s is the one that is tested", async (name, program) => {
  await expect(toPython(program)).toMatchFileSnapshot(`../../../tests/server/ui/programs/${name}.py`);
});

test.each(Object.entries(EXAMPLES))("the graph of %s is the one that is tested", async (name, program) => {
  const { graph } = compile(program);
  await expect(lines(graph)).toMatchFileSnapshot(`../../../tests/server/ui/programs/${name}.json`);
});

const WITHOUT_TURNS = ["essay_judge", "self_consistency", "skeleton_of_thought"];

test.each(WITHOUT_TURNS)("%s without turns, for models without a chat template, is tested too", async (name) => {
  const program = EXAMPLES[name]!;
  const folder = "../../../tests/server/ui/programs";
  await expect(toPython(program, false)).toMatchFileSnapshot(`${folder}/${name}_without_turns.py`);
  const { graph } = compile(program, { hasTurns: false });
  const { ops } = graph.submission(1, [], { seed: 1 });
  expect(ops.filter((op) => op.op === "begin" || op.op === "end")).toEqual([]);
  await expect(lines(graph)).toMatchFileSnapshot(`${folder}/${name}_without_turns.json`);
});

test("images are files beside the program", () => {
  const images = [{ source: "", name: 'a "b".png', width: 1, height: 1, thumbnail: "" }];
  const program: Program = {
    title: "t",
    about: "",
    system: "",
    user: "Look.",
    images,
    steps: [{ kind: "say", role: "user", text: "", images }, gen("answer")],
    sampling: DEFAULT_SAMPLING,
  };
  expect(toPython(program)).toContain('s += af.user(af.image("a \\"b\\".png"), "Look.")\n');
  expect(toPython(program)).toContain('s += af.user(af.image("a \\"b\\".png"))\n');
  expect(toPython(program, false)).toContain('s += af.image("a \\"b\\".png") + "Look." + "\\n\\n"\n');
});

test("f37: each gen has its own schema", () => {
  const typed = (name: string, type: string) =>
    gen(name, { shape: { kind: "schema", source: JSON.stringify({ type }) } });
  const program: Program = {
    title: "t",
    about: "",
    system: "",
    user: "Hm?",
    steps: [
      typed("plan", "integer"),
      { kind: "say", role: "user", text: "And?" },
      typed("Plan", "boolean"),
      { kind: "fork", branches: [{ label: "a", instruction: "b" }], steps: [typed("deep", "null")] },
      { kind: "say", role: "user", text: "And?" },
      typed("deep", "string"),
    ],
    sampling: DEFAULT_SAMPLING,
  };
  const source = toPython(program);
  for (const [name, constant, type] of [
    ["plan", "PLAN_SCHEMA", "integer"],
    ["Plan", "PLAN_SCHEMA_2", "boolean"],
    ["deep", "DEEP_SCHEMA", "null"],
    ["deep", "DEEP_SCHEMA_2", "string"],
  ]) {
    expect(source).toContain(`${constant} = {"type": "${type}"}\n`);
    expect(source).toContain(`af.gen("${name}", max_tokens=96, schema=${constant})`);
  }
});

test("strings escape what Python or an editor could misread", () => {
  expect(text('a "b"\n\\ \u202e \u2028 \u0085')).toBe('"a \\"b\\"\\n\\\\ \\u202e \\u2028 \\u0085"');
  expect(text("\ud800")).toBe('"\ufffd"');
});

test("braces around a reference stay braces", () => {
  const program: Program = {
    title: "t",
    about: "",
    system: "",
    user: "Hm?",
    steps: [gen("tip"), { kind: "say", role: "user", text: "{tip} {x} 100%" }, gen("more")],
    sampling: DEFAULT_SAMPLING,
  };
  expect(toPython(program)).toContain(`s += af.user(f"{s['tip'].strip()} {{x}} 100%")`);
});
