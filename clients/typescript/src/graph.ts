// Graphs: whole programs that the server runs without a round trip, and their runs.

import type { AgentflowError } from "./agentflow_error.js";
import { BadArgument, DataDependent, ForeignState } from "./errors.js";
import type { CancelOptions } from "./failure.js";
import type { Image } from "./image.js";
import { IN_GRAPH, MAX_GRAPH_OPS, type OpenOp, type Op, type SubmitGraphOp } from "./protocol.js";
import { State, type Link } from "./state.js";
import { Variable } from "./variable.js";

const ROOT = 1;

/** Options of a root state. */
export interface StateOptions {
  /** States with the same value are siblings to the scheduler. */
  program?: string | undefined;
  /** A name that watchers see instead of `program`. */
  label?: string | undefined;
  /** States share cached KV only under an equal salt. */
  cacheSalt?: string | undefined;
  /** Optimise for response time, or for total throughput. */
  objective?: "latency" | "throughput" | undefined;
  /** One of `session.models`; by default the session's. */
  model?: string | undefined;
}

/** The op that opens a root state. */
export function openOp(number: number, options: StateOptions): OpenOp {
  const op: OpenOp = { op: "open", state: number };
  if (options.program) op.program = options.program;
  if (options.label) op.label = options.label;
  if (options.cacheSalt) op.cache_salt = options.cacheSalt;
  if (options.objective) op.objective = options.objective;
  if (options.model) op.model = options.model;
  return op;
}

/**
 * A program as data. `root` has the methods of a state, which record instead of running; `session.submit` runs all
 * of it. A graph can be submitted several times, also while it grows.
 */
export class Graph {
  /** The state that the graph begins with. */
  readonly root: State;
  readonly #recorder: Recorder;

  constructor(options: StateOptions = {}) {
    this.#recorder = new Recorder(options);
    this.root = new State(this.#recorder, this.#recorder.nextNumber(), [], options.model);
  }

  /** A text that `submit` gets as `inputs[name]`, and that can be appended like a variable. */
  input(name: string): Variable {
    return this.#recorder.input(this.root, name);
  }

  /** The variables of its gens, selects, sets and reads, in their order. */
  get variables(): readonly Variable[] {
    return this.#recorder.outputs;
  }

  /** The recorded ops, in the protocol's form. States and variables are numbered from 1. */
  get ops(): readonly Op[] {
    return this.#recorder.ops;
  }

  /** @internal */
  owns(one: State | Variable): boolean {
    return (one instanceof State ? this.#recorder.states : this.#recorder.variables).get(one.number) === one;
  }

  /** @internal */
  submission(base: number, outputs: readonly Variable[], options: SubmitOptions): SubmitGraphOp {
    const recorder = this.#recorder;
    if (recorder.ops.length > MAX_GRAPH_OPS) {
      throw new BadArgument(`a graph has at most ${MAX_GRAPH_OPS} ops, not ${recorder.ops.length}`);
    }
    const op: SubmitGraphOp = {
      op: "submit",
      state: base,
      ops: [...recorder.ops],
      outputs: outputs.map((variable) => variable.number),
      live: options.live === true,
    };
    const given = options.inputs ?? {};
    for (const name of Object.keys(given)) {
      if (!recorder.inputs.has(name)) throw new BadArgument(`submit: the graph has no input ${JSON.stringify(name)}`);
    }
    for (const [name, number] of recorder.inputs) {
      const text = given[name];
      if (typeof text !== "string") throw new BadArgument(`submit: the input ${JSON.stringify(name)} is missing`);
      (op.inputs ??= {})[number] = text;
    }
    if (options.seed !== undefined) {
      op.seeds = `${options.seed}/0`;
      op.places = { ...recorder.places };
    }
    return op;
  }

  /** @internal The images that its ops refer to. */
  get images(): Iterable<Image> {
    return this.#recorder.images;
  }

  /** @internal The number of numbers that a run takes. */
  get size(): number {
    return this.#recorder.size;
  }
}

/** Options of `session.submit`. */
export interface SubmitOptions {
  /** The variables to report; by default all. */
  outputs?: readonly Variable[] | undefined;
  /** Report them also while they are generated. */
  live?: boolean | undefined;
  /** The texts of the graph's inputs. */
  inputs?: Readonly<Record<string, string>> | undefined;
  /** Gens without a seed get one that is derived from this, as in the first run of a session in Python. */
  seed?: number | undefined;
}

class Recorder implements Link {
  readonly isRecording = true;
  readonly ops: Op[] = [];
  readonly states = new Map<number, State>();
  readonly variables = new Map<number, Variable>();
  readonly outputs: Variable[] = [];
  readonly images = new Set<Image>();
  readonly inputs = new Map<string, number>();
  readonly places: Record<number, string> = {};
  size = 0;

  constructor(options: StateOptions) {
    this.ops.push(openOp(ROOT, options));
  }

  nextNumber(): number {
    return ++this.size;
  }

  input(root: State, name: string): Variable {
    if (this.inputs.has(name)) throw new BadArgument(`the graph has an input ${JSON.stringify(name)} already`);
    const variable = new Variable(root, this.nextNumber(), name);
    this.variables.set(variable.number, variable);
    this.inputs.set(name, variable.number);
    // It takes its place at the beginning: any state may refer to it.
    this.ops.splice(this.inputs.size, 0, { op: "expect", state: ROOT, var: variable.number, name });
    return variable;
  }

  send(op: Op, images: readonly Image[] = []): void {
    if (!IN_GRAPH.has(op.op)) throw new DataDependent(`a graph cannot contain the op ${op.op}`);
    this.ops.push(op);
    for (const image of images) this.images.add(image);
  }

  prepare(): void {}

  addState(state: State): void {
    this.states.set(state.number, state);
  }

  addVariable(variable: Variable): void {
    this.variables.set(variable.number, variable);
    if (this.ops.at(-1)?.op !== "done") this.outputs.push(variable);
  }

  addPlace(variable: Variable, place: string): void {
    this.places[variable.number] = place;
  }

  want(): void {}

  isOpen(): boolean {
    throw new DataDependent("a state of a graph cannot be cancelled or closed: use the run");
  }

  dropState(): void {}

  done(): Promise<void> {
    return Promise.reject(new DataDependent("a state of a graph cannot be awaited: submit it and await the run"));
  }
}

/** What a run needs of its session. */
export interface RunLink extends Link {
  cancel(number: number, options?: CancelOptions): void;
}

/** A graph that was submitted. */
export class Run {
  readonly graph: Graph;
  /** The variables that the server reports, in the order of `outputs`. */
  readonly variables: readonly Variable[];
  readonly #link: RunLink;
  readonly #root: State;
  readonly #byNumber = new Map<number, Variable>();
  readonly #done: Promise<void>;

  /** @internal */
  constructor(link: RunLink, graph: Graph, root: State, done: Promise<void>, outputs: readonly Variable[]) {
    this.#link = link;
    this.graph = graph;
    this.#root = root;
    this.#done = done;
    this.variables = outputs.map((output) => {
      const variable = new Variable(root, root.number + output.number - 1, output.name);
      variable.isUsed = output.isUsed;
      link.addVariable(variable);
      this.#byNumber.set(output.number, variable);
      return variable;
    });
  }

  /** The live variable of a variable of the graph. */
  variable(variable: Variable): Variable {
    const found = this.graph.owns(variable) ? this.#byNumber.get(variable.number) : undefined;
    if (!found) throw new ForeignState(`${variable.name} is not among the outputs of this run`);
    return found;
  }

  /** Why the run has failed. */
  get error(): AgentflowError | undefined {
    return this.#root.error;
  }

  /** Resolves when all states of the graph have ended; throws the error of the first that failed. */
  done(): Promise<void> {
    return this.#done;
  }

  /** Cancels the whole run. A program that failed gives its error as `failure`. */
  cancel(options: CancelOptions = {}): void {
    if (this.#link.isOpen(this.#root)) this.#link.cancel(this.#root.number, options);
  }

  /** Cancels one state of the graph and its forks. The others go on, unless they need its variables. */
  cancelBranch(state: State): void {
    if (!this.graph.owns(state)) throw new ForeignState("the state does not belong to the run's graph");
    if (this.#link.isOpen(this.#root)) this.#link.cancel(this.#root.number + state.number - 1);
  }
}
