// Form to graph: a program becomes one graph, which the server runs without a round trip.
//
// The result names each gen and select by a key: its lane's path and its index there, as in "1.0:2". A run that
// ended early goes on with a second graph, in which the texts that are already known are written out (`known`)
// and lanes that were cancelled are left out (`without`).
import { Graph, type GenOptions, type Part, type State, type Variable } from "agentflow-client";
import { piecesOf, resultOf, schemaOf, type ForkStep, type GenStep, type Program, type SelectStep, type Step } from "./program";

export interface Lane {
  /** "" is the root, "1" its second branch, "1.0" the first branch of that. */
  path: string;
  label: string;
  state: State;
  items: Item[];
}

export interface CallItem {
  kind: "gen" | "select";
  key: string;
  step: GenStep | SelectStep;
  /** Null: its text is known. */
  variable: Variable | null;
  /** The tokens of its prompt, as a JSON list. */
  tokens: Variable | null;
}

export type Item =
  | { kind: "turn"; key: string; role: "system" | "user" | "assistant"; text: string }
  | CallItem
  | { kind: "fork"; key: string; step: ForkStep; lanes: Lane[] }
  | { kind: "join"; key: string; before: string; after: string; labels: string[] };

export interface Compiled {
  graph: Graph;
  root: Lane;
}

export interface CompileOptions {
  known?: ReadonlyMap<string, string>;
  without?: ReadonlySet<string>;
  /** Reads the prompts' tokens where a fork has at most so many branches; 0: nowhere. */
  maxTokenReads?: number;
}

type Scope = Map<string, Part>;

export function compile(program: Program, options: CompileOptions = {}): Compiled {
  const graph = new Graph({ program: "playground", label: program.title });
  const root: Lane = { path: "", label: program.title, state: graph.root, items: [] };
  const { known = new Map(), without = new Set(), maxTokenReads = 16 } = options;

  function turn(lane: Lane, role: "system" | "user" | "assistant", text: string, scope: Scope, key: string): void {
    lane.state[role](...partsOf(text, scope));
    lane.items.push({ kind: "turn", key, role, text });
  }

  function call(lane: Lane, step: GenStep | SelectStep, key: string, scope: Scope, reads: boolean): void {
    const { state } = lane;
    const text = known.get(key);
    state.begin("assistant");
    if (step.lead) state.text(...partsOf(step.lead, scope));
    let variable: Variable | null = null;
    let tokens: Variable | null = null;
    if (text !== undefined) {
      state.text(text);
      scope.set(step.name, text.trim());
    } else {
      if (reads) tokens = state.read(`tokens before ${step.name}`, "tokens");
      variable =
        step.kind === "gen"
          ? state.gen(step.name, genOptions(program, step))
          : state.select(step.name, step.choices.filter((choice) => choice !== ""));
      scope.set(step.name, variable.strip());
    }
    state.end();
    lane.items.push({ kind: step.kind, key, step, variable, tokens });
  }

  function run(lane: Lane, steps: readonly Step[], scope: Scope, reads: boolean): void {
    let joinable: { fork: ForkStep; lanes: Lane[]; values: Part[] } | null = null;
    steps.forEach((step, index) => {
      const key = `${lane.path}:${index}`;
      if (step.kind === "say") turn(lane, step.role, step.text, scope, key);
      else if (step.kind === "gen" || step.kind === "select") call(lane, step, key, scope, reads);
      else if (step.kind === "fork") {
        // Left-out branches are not forked; the others keep their paths, labels and keys.
        const kept = step.branches
          .map((branch, number) => ({ branch, path: lane.path ? `${lane.path}.${number}` : `${number}` }))
          .filter(({ path }) => !without.has(path));
        const states = kept.length ? lane.state.fork(kept.length) : [];
        const name = resultOf(step);
        const values: Part[] = [];
        const lanes = kept.map(({ branch, path }, number) => {
          const inner: Lane = { path, label: branch.label, state: states[number]!, items: [] };
          const innerScope = new Map(scope);
          if (branch.instruction.trim()) turn(inner, "user", branch.instruction, innerScope, `${path}:in`);
          run(inner, step.steps, innerScope, reads && step.branches.length <= maxTokenReads);
          if (name) values.push(innerScope.get(name)!);
          return inner;
        });
        lane.items.push({ kind: "fork", key, step, lanes });
        joinable = { fork: step, lanes, values };
      } else {
        const parts: Part[] = [];
        if (step.before) parts.push(...partsOf(step.before, scope), "\n");
        const labels: string[] = [];
        joinable?.lanes.forEach((branch, number) => {
          const value = joinable!.values[number];
          if (value === undefined) return;
          labels.push(branch.label);
          parts.push(`${branch.label}: `, value, "\n");
        });
        if (step.after) parts.push(...partsOf(step.after, scope));
        lane.state.user(...parts);
        lane.items.push({ kind: "join", key, before: step.before, after: step.after, labels });
        joinable = null;
      }
    });
  }

  const scope: Scope = new Map();
  if (program.system.trim()) turn(root, "system", program.system, scope, ":system");
  if (program.user.trim()) turn(root, "user", program.user, scope, ":user");
  run(root, program.steps, scope, maxTokenReads > 0);
  return { graph, root };
}

function partsOf(text: string, scope: Scope): Part[] {
  return piecesOf(text, new Set(scope.keys())).map((piece) =>
    typeof piece === "string" ? piece : scope.get(piece.name)!,
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
