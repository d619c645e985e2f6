// Form to Python: the same program, for agentflow's own language. A test runs what this writes.
import type { ShownImage } from "../images/picture";
import { TURN_END } from "./compile";
import { imagesOf, piecesOf, resultOf, schemaOf, type ForkStep, type GenStep, type Program, type SelectStep, type Step } from "./program";

const WIDTH = 100;

/** The source of a file that runs the program: on a server with AGENTFLOW_URL set, else in its own process.
 * `hasTurns`: the model has a chat template. */
export function toPython(program: Program, hasTurns = true): string {
  const writer = new Writer(program, hasTurns);
  const body = writer.body();
  const seed = program.sampling.seed;
  return [
    `"""${docText(program.title)}: ${docText(program.about)}"""`,
    "",
    "import asyncio",
    "",
    "import agentflow as af",
    "",
    ...writer.constants,
    ...(writer.constants.length ? [""] : []),
    "",
    "@af.program",
    "async def program(s: af.State) -> str:",
    ...body.map((line) => (line ? `    ${line}` : "")),
    "",
    "",
    "async def main() -> None:",
    `    async with af.session(${seed === null ? "" : `seed=${seed}`}) as flow:`,
    "        print(await flow.run(program))",
    "",
    "",
    'if __name__ == "__main__":',
    "    asyncio.run(main())",
    "",
  ].join("\n");
}

class Writer {
  readonly constants: string[] = [];
  readonly #schemaNames = new Set<string>();
  #numForks = 0;

  constructor(
    private readonly program: Program,
    private readonly hasTurns: boolean,
  ) {}

  body(): string[] {
    const { program } = this;
    const lines: string[] = [];
    const scope = new Map<string, string>();
    if (program.system.trim()) lines.push(...this.#turn("s", "system", [text(program.system)]));
    const said = program.user.trim() ? [text(program.user)] : [];
    const parts = [...images(program.images ?? []), ...said];
    if (parts.length) lines.push(...this.#turn("s", "user", parts));
    const leaf = leafOf(program.steps);
    if (leaf) lines.push("outputs: list[af.Variable] = []");
    lines.push(...this.#steps("s", program.steps, scope, leaf !== null));
    if (leaf) lines.push('return "\\n".join([str(await output) for output in outputs])');
    else lines.push(`return str(await s[${text([...scope.keys()].at(-1) ?? "")}])`);
    return lines;
  }

  /** `scope`: each variable's name, with the state that has it. */
  #steps(state: string, steps: readonly Step[], scope: Map<string, string>, collects: boolean): string[] {
    const lines: string[] = [];
    let fork: { step: ForkStep; branches: string; labels: string } | null = null;
    const last = steps.findLast((step) => step.kind !== "say" && step.kind !== "join");
    for (const step of steps) {
      switch (step.kind) {
        case "say":
          lines.push(
            ...this.#turn(state, step.role, [
              ...images(imagesOf(step)),
              ...(step.text || imagesOf(step).length === 0 ? [this.#text(step.text, scope)] : []),
            ]),
          );
          break;
        case "gen":
        case "select":
          lines.push(...this.#call(state, step, scope));
          scope.set(step.name, state);
          break;
        case "fork":
          fork = this.#fork(state, step, scope, lines, collects && step === last, steps.some((one) => one.kind === "join"));
          break;
        case "join": {
          const parts: string[] = [];
          if (step.before) parts.push(this.#text(`${step.before}\n`, scope));
          if (fork) {
            lines.push(
              "found = [",
              `    f"{label}: {branch['${resultOf(fork.step)}'].strip()}\\n"`,
              `    for label, branch in zip(${fork.labels}, ${fork.branches}, strict=True)`,
              "]",
            );
            parts.push(this.hasTurns ? "*found" : '"".join(found)');
          }
          if (step.after) parts.push(this.#text(step.after, scope));
          lines.push(...this.#turn(state, "user", parts));
          fork = null;
          break;
        }
      }
    }
    return lines;
  }

  #fork(state: string, step: ForkStep, scope: Map<string, string>, lines: string[], collects: boolean, isJoined: boolean) {
    const number = ++this.#numForks;
    const suffix = number === 1 ? "" : String(number);
    const branch = `branch${suffix}`;
    const branches = `branches${suffix}`;
    const has = step.branches.some((one) => one.instruction.trim());
    const labels = `LABELS${suffix}`;
    if (isJoined) this.constants.push(...list(labels, step.branches.map((one) => text(one.label))));
    lines.push(`async with ${state}.fork(${step.branches.length}) as ${branches}:`);
    const inner: string[] = [];
    const innerScope = new Map(scope);
    if (has) {
      // An instruction with a reference is an f-string and stands in the program; others are constants.
      const instructions = step.branches.map((one) => this.#text(one.instruction, scope));
      const isConstant = instructions.every((one) => !one.startsWith("f"));
      const name = isConstant ? `INSTRUCTIONS${suffix}` : `instructions${suffix}`;
      if (isConstant) this.constants.push(...list(name, instructions));
      else lines.splice(-1, 0, ...list(name, instructions));
      lines.push(`    for ${branch}, instruction in zip(${branches}, ${name}, strict=True):`);
      const isEach = step.branches.every((one) => one.instruction.trim());
      inner.push(...(isEach ? [] : ["if instruction:"]), `${isEach ? "" : "    "}${this.#turn(branch, "user", ["instruction"])[0]}`);
    } else lines.push(`    for ${branch} in ${branches}:`);
    inner.push(...this.#steps(branch, step.steps, innerScope, collects));
    const leaf = resultOf(step);
    if (collects && leafOf(step.steps) === null && leaf) inner.push(`outputs.append(${branch}[${text(leaf)}])`);
    lines.push(...inner.map((line) => `        ${line}`));
    return { step, branches, labels };
  }

  #call(state: string, step: GenStep | SelectStep, scope: Map<string, string>): string[] {
    const parts = step.lead ? [this.#text(step.lead, scope)] : [];
    if (step.kind === "select") {
      const choices = step.choices.filter((choice) => choice !== "").map(text);
      parts.push(`af.select(${text(step.name)}, [${choices.join(", ")}])`);
    } else parts.push(this.#gen(step));
    return this.#turn(state, "assistant", parts);
  }

  /** Appends a turn with these parts, which are expressions. */
  #turn(state: string, role: string, parts: readonly string[]): string[] {
    const all = this.hasTurns ? parts : [...parts, text(TURN_END)];
    const line = this.hasTurns ? `${state} += af.${role}(${all.join(", ")})` : `${state} += ${all.join(" + ")}`;
    if (line.length <= WIDTH || parts.length === 1) return [line];
    if (this.hasTurns) return [`${state} += af.${role}(`, ...all.map((part) => `    ${part},`), ")"];
    return [`${state} += (`, ...all.map((part, index) => `    ${index ? "+ " : ""}${part}`), ")"];
  }

  #gen(step: GenStep): string {
    const { temperature, topP, maxTokens } = this.program.sampling;
    const options = [text(step.name), `max_tokens=${step.maxTokens ?? maxTokens}`];
    if (step.stop.length === 1) options.push(`stop=${text(step.stop[0]!)}`);
    else if (step.stop.length) options.push(`stop=[${step.stop.map(text).join(", ")}]`);
    if (temperature > 0) {
      options.push(`temperature=${temperature}`);
      if (topP < 1) options.push(`top_p=${topP}`);
    }
    if (step.shape.kind === "regex") options.push(`regex=${text(step.shape.source)}`);
    if (step.shape.kind === "schema") {
      const name = this.#schemaName(step.name);
      this.constants.push(...`${name} = ${value(schemaOf(step.shape.source) ?? {})}`.split("\n"));
      options.push(`schema=${name}`);
    }
    return `af.gen(${options.join(", ")})`;
  }

  /** Names of gens differ by case, or stand in different branches. */
  #schemaName(gen: string): string {
    const plain = `${gen.toUpperCase()}_SCHEMA`;
    let name = plain;
    for (let number = 2; this.#schemaNames.has(name); number++) name = `${plain}_${number}`;
    this.#schemaNames.add(name);
    return name;
  }

  /** A string, or an f-string where it refers to variables. */
  #text(source: string, scope: Map<string, string>): string {
    const pieces = piecesOf(source, new Set(scope.keys()));
    if (pieces.every((piece) => typeof piece === "string")) return text(source);
    const inner = pieces.map((piece) =>
      typeof piece === "string"
        ? text(piece).slice(1, -1).replaceAll("{", "{{").replaceAll("}", "}}")
        : `{${scope.get(piece.name)!}['${piece.name}'].strip()}`,
    );
    return `f"${inner.join("")}"`;
  }
}

/** The fork with which the steps end, if nothing generates text after it: its branches are the results. */
function leafOf(steps: readonly Step[]): ForkStep | null {
  const last = steps.findLast((step) => step.kind !== "say" && step.kind !== "join");
  return last?.kind === "fork" ? last : null;
}

/** The images as files beside the program. */
function images(shown: readonly ShownImage[]): string[] {
  return shown.map(({ name }) => `af.image(${text(name)})`);
}

function list(name: string, items: readonly string[]): string[] {
  const line = `${name} = [${items.join(", ")}]`;
  return line.length <= WIDTH ? [line] : [`${name} = [`, ...items.map((item) => `    ${item},`), "]"];
}

/** A string literal of Python: JSON's escapes are also Python's, but for pairs of surrogates. */
export function text(source: string): string {
  return JSON.stringify(source.toWellFormed()).replace(
    /[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

function value(json: unknown, indent = ""): string {
  if (json === null) return "None";
  if (typeof json === "boolean") return json ? "True" : "False";
  if (typeof json === "string") return text(json);
  if (typeof json !== "object") return String(json);
  const isList = Array.isArray(json);
  const deeper = `${indent}    `;
  const members = isList
    ? json.map((one) => value(one, deeper))
    : Object.entries(json as object).map(([name, one]) => `${text(name)}: ${value(one, deeper)}`);
  const [open, close] = isList ? ["[", "]"] : ["{", "}"];
  const line = `${open}${members.join(", ")}${close}`;
  if (indent.length + line.length <= 80 && !line.includes("\n")) return line;
  return `${open}\n${members.map((one) => `${deeper}${one},\n`).join("")}${indent}${close}`;
}

function docText(source: string): string {
  return source.replace(/["\\]/g, "'").replace(/\s+/g, " ").trim();
}
