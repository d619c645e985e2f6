// Form to graph: a program becomes one graph, which the server runs without a round trip.
//
// The result names each gen and select by a key: its lane's path and its index there, as in "1.0:2". A run that
// ended early goes on with a second graph, in which the texts that are already known are written out (`known`)
// and lanes that were cancelled are left out (`without`).
//
// A model without a chat template has no turns: the texts follow each other, with an empty line after each.
import { Graph, type GenOptions, type Image, type Part, type State, type Variable } from "agentflow-client";
import type { ShownImage } from "../images/picture";
import { imagesOf, piecesOf, resultOf, schemaOf, type ForkStep, type GenStep, type Program, type SelectStep, type Step } from "./program";

export interface Lane {
  /** "" is the root, "1" its second branch, "1.0" the first branch of that. */
  path: string;
  label: string;
  state: State;
  items: Item[];
}

/** A piece of a text: literal, or the value of a call above it. */
export type TextPiece = string | { readonly name: string; readonly key: string };

export interface CallItem {
  kind: "gen" | "select";
  key: string;
  step: GenStep | SelectStep;
  /** What the turn begins with. */
  lead: TextPiece[];
  /** Null: its text is known. */
  variable: Variable | null;
  /** The tokens of its prompt, as a JSON list. */
  tokens: Variable | null;
}

export type Item =
  | { kind: "turn"; key: string; role: "system" | "user" | "assistant"; text: TextPiece[]; images: readonly ShownImage[] }
  | CallItem
  | { kind: "fork"; key: string; step: ForkStep; lanes: Lane[] }
  | { kind: "join"; key: string; before: TextPiece[]; after: TextPiece[]; results: Result[] };

/** The last value of a branch, which a join appends. */
export interface Result {
  readonly label: string;
  readonly path: string;
  readonly key: string;
}

export interface Compiled {
  graph: Graph;
  root: Lane;
}

export interface CompileOptions {
  known?: ReadonlyMap<string, string>;
  without?: ReadonlySet<string>;
  /** Reads the prompts' tokens where a fork has at most so many branches; 0: nowhere. */
  maxTokenReads?: number;
  /** Whether the model has a chat template; by default it has. */
  hasTurns?: boolean;
  /** The images of their sources. */
  imageOf?: (source: string) => Image | undefined;
}

/** After each turn of a model without a chat template. */
export const TURN_END = "\n\n";

/** The calls that texts may refer to, by name. */
type Scope = Map<string, { readonly part: Part; readonly key: string }>;

export function compile(program: Program, options: CompileOptions = {}): Compiled {
  const { known = new Map(), without = new Set(), maxTokenReads = 16, hasTurns = true, imageOf } = options;
  const isContinued = known.size + without.size > 0;
  const label = isContinued ? `${program.title}, continued` : program.title;
  const graph = new Graph({ program: "playground", label });
  const root: Lane = { path: "", label: program.title, state: graph.root, items: [] };

  function append(lane: Lane, role: "system" | "user" | "assistant", parts: Part[]): void {
    if (hasTurns) lane.state[role](...parts);
    else lane.state.text(...parts, TURN_END);
  }

  function turn(
    lane: Lane,
    role: "system" | "user" | "assistant",
    text: string,
    scope: Scope,
    key: string,
    images: readonly ShownImage[] = [],
  ): void {
    append(lane, role, [...images.flatMap(({ source }) => imageOf?.(source) ?? []), ...partsOf(text, scope)]);
    lane.items.push({ kind: "turn", key, role, text: shownPieces(text, scope), images });
  }

  function call(lane: Lane, step: GenStep | SelectStep, key: string, scope: Scope, reads: boolean): void {
    const { state } = lane;
    const text = known.get(key);
    const lead = shownPieces(step.lead, scope);
    if (hasTurns) state.begin("assistant");
    if (step.lead) state.text(...partsOf(step.lead, scope));
    let variable: Variable | null = null;
    let tokens: Variable | null = null;
    if (text !== undefined) {
      state.text(text);
      scope.set(step.name, { part: text.trim(), key });
    } else {
      if (reads) tokens = state.read(`tokens before ${step.name}`, "tokens");
      variable =
        step.kind === "gen"
          ? state.gen(step.name, genOptions(program, step))
          : state.select(step.name, step.choices.filter((choice) => choice !== ""));
      scope.set(step.name, { part: variable.strip(), key });
    }
    if (hasTurns) state.end();
    else state.text(TURN_END);
    lane.items.push({ kind: step.kind, key, step, lead, variable, tokens });
  }

  function run(lane: Lane, steps: readonly Step[], scope: Scope, reads: boolean): void {
    let results: (Result & { readonly part: Part })[] = [];
    steps.forEach((step, index) => {
      const key = `${lane.path}:${index}`;
      if (step.kind === "say") turn(lane, step.role, step.text, scope, key, imagesOf(step));
      else if (step.kind === "gen" || step.kind === "select") call(lane, step, key, scope, reads);
      else if (step.kind === "fork") {
        // Left-out branches are not forked; the others keep their paths, labels and keys.
        const kept = step.branches
          .map((branch, number) => ({ branch, path: lane.path ? `${lane.path}.${number}` : `${number}` }))
          .filter(({ path }) => !without.has(path));
        const states = kept.length ? lane.state.fork(kept.length) : [];
        const name = resultOf(step);
        results = [];
        const lanes = kept.map(({ branch, path }, number) => {
          const inner: Lane = { path, label: branch.label, state: states[number]!, items: [] };
          const innerScope = new Map(scope);
          if (branch.instruction.trim()) turn(inner, "user", branch.instruction, innerScope, `${path}:in`);
          run(inner, step.steps, innerScope, reads && step.branches.length <= maxTokenReads);
          if (name) results.push({ label: branch.label, path, ...innerScope.get(name)! });
          return inner;
        });
        lane.items.push({ kind: "fork", key, step, lanes });
      } else {
        const parts: Part[] = [];
        if (step.before) parts.push(...partsOf(step.before, scope), "\n");
        for (const { label, part } of results) parts.push(`${label}: `, part, "\n");
        if (step.after) parts.push(...partsOf(step.after, scope));
        append(lane, "user", parts);
        const [before, after] = [shownPieces(step.before, scope), shownPieces(step.after, scope)];
        lane.items.push({ kind: "join", key, before, after, results });
        results = [];
      }
    });
  }

  const scope: Scope = new Map();
  if (program.system.trim()) turn(root, "system", program.system, scope, ":system");
  const { images = [] } = program;
  if (program.user.trim() || images.length) turn(root, "user", program.user, scope, ":user", images);
  run(root, program.steps, scope, maxTokenReads > 0);
  return { graph, root };
}

function partsOf(text: string, scope: Scope): Part[] {
  return piecesOf(text, new Set(scope.keys())).map((piece) =>
    typeof piece === "string" ? piece : scope.get(piece.name)!.part,
  );
}

/** The same for the stage: a reference names the call whose value it shows. */
function shownPieces(text: string, scope: Scope): TextPiece[] {
  return piecesOf(text, new Set(scope.keys())).map((piece) =>
    typeof piece === "string" ? piece : { name: piece.name, key: scope.get(piece.name)!.key },
  );
}

export function genOptions(program: Program, step: GenStep): GenOptions {
  const { temperature, topP, maxTokens } = program.sampling;
  const options: GenOptions = { maxTokens: step.maxTokens ?? maxTokens };
  if (temperature > 0) {
    options.temperature = temperature;
    if (topP < 1) options.topP = topP;
  }
  if (step.stop.length) options.stop = step.stop;
  if (step.shape.kind === "schema") options.schema = schemaOf(step.shape.source) ?? {};
  if (step.shape.kind === "regex") options.regex = step.shape.source;
  return options;
}

/** All gens and selects of a lane and the lanes below it, in the order of the program. */
export function* callsOf(lane: Lane): Generator<{ lane: Lane; call: CallItem }> {
  for (const item of lane.items) {
    if (item.kind === "gen" || item.kind === "select") yield { lane, call: item };
    else if (item.kind === "fork") for (const inner of item.lanes) yield* callsOf(inner);
  }
}

/** The length of each call's prompt in characters, as far as its texts are known. `textOf`: those of calls, by key. */
export function* promptLengths(lane: Lane, textOf: (key: string) => string, before = 0): Generator<[string, number]> {
  const lengthOf = (pieces: readonly TextPiece[]): number =>
    pieces.reduce((sum, piece) => sum + (typeof piece === "string" ? piece : textOf(piece.key)).length, 0);
  let length = before;
  for (const item of lane.items) {
    switch (item.kind) {
      case "turn":
        length += lengthOf(item.text);
        break;
      case "join":
        length += lengthOf(item.before) + lengthOf(item.after);
        for (const { label, key } of item.results) length += label.length + textOf(key).length;
        break;
      case "fork":
        for (const inner of item.lanes) yield* promptLengths(inner, textOf, length);
        break;
      default:
        length += lengthOf(item.lead);
        yield [item.key, length];
        length += textOf(item.key).length;
    }
  }
}
