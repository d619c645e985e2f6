// Sessions: a connection to a server with all its states and variables.

import type { AgentflowError } from "./agentflow_error.js";
import { guarded } from "./changes.js";
import { Connection, type Status } from "./connection.js";
import { embedFields, embedTexts, type EmbedOptions } from "./embeddings.js";
import { EngineDown, ForeignState, StateClosed, UnknownModel } from "./errors.js";
import { cancelOp, type CancelOptions } from "./failure.js";
import { Graph, openOp, Run, type RunLink, type StateOptions, type SubmitOptions } from "./graph.js";
import type { Image } from "./image.js";
import {
  GRAPH_TICKET,
  type Capabilities,
  type GraphReplyEvent,
  type LiveGraph,
  type Op,
  type PeekedEvent,
  type ServerEvent,
  type Stats,
  type StatsReplyEvent,
  type WatchOp,
} from "./protocol.js";
import { receivedError } from "./received_error.js";
import { State } from "./state.js";
import { Transport, type WebSocketConstructor } from "./transport.js";
import { Uploads } from "./uploads.js";
import type { Variable } from "./variable.js";
import { mergeWatched, type Watched, type WatchOptions } from "./watch.js";

/** Options of `connect`. */
export interface ConnectOptions {
  /** `ws://HOST:PORT`, or `wss`, `http` or `https`; by default the page's own origin. */
  url?: string | undefined;
  /** The API key. The client exchanges it for a ticket before each connection; it is in no URL. */
  key?: string | undefined;
  /**
   * Gets a ticket before each connection, for pages whose own server has the key. If it throws an error that is
   * no `AgentflowError`, the server counts as not reached; while a session is resumed, the call is repeated.
   */
  ticket?: (() => Promise<string | undefined>) | undefined;
  /** The name of a model; by default the server's first one. */
  model?: string | undefined;
  /** Aborts connecting, and closes the session later. */
  signal?: AbortSignal | undefined;
  /** The class of websockets, where there is none globally: Node.js before version 22. */
  WebSocket?: WebSocketConstructor | undefined;
  /** The time for a connection to be opened, in seconds; by default 10. */
  openTimeoutS?: number | undefined;
  /** After so many seconds of silence the client asks for an answer, and reconnects after as many; by default 20. */
  keepaliveS?: number | undefined;
  /**
   * The largest sum of ops that the server has not acknowledged, in bytes; by default 64 MiB. Beyond it, only small
   * ops are sent that ask, await or end something; others throw `BacklogFull`.
   */
  maxBufferedBytes?: number | undefined;
  /** Gets the lines of a recording: the header, then each op that is sent and each event that is received. */
  record?: ((line: object) => void) | undefined;
}

/**
 * Opens a session. Rejects with `ServerUnreachable`, `NotAuthorized` for a missing or wrong key, `Overloaded`,
 * `UnknownModel`.
 */
export async function connect(options: ConnectOptions = {}): Promise<Session> {
  const transport = new Transport({
    url: options.url,
    key: options.key,
    ticket: options.ticket,
    model: options.model,
    openTimeoutS: options.openTimeoutS ?? 10,
    WebSocket: options.WebSocket,
  });
  const [socket, welcome] = await transport.open(undefined, options.signal);
  return new Session(
    (handlers) =>
      new Connection(transport, socket, welcome, handlers, {
        keepaliveS: options.keepaliveS ?? 20,
        maxBufferedBytes: options.maxBufferedBytes ?? 64 * 1024 * 1024,
        record: options.record,
      }),
    options.signal,
  );
}

type Answer = StatsReplyEvent | GraphReplyEvent | PeekedEvent;

interface Waiting<T> {
  resolve(value: T): void;
  reject(error: unknown): void;
}

/** A session with a server. Where its connection breaks, it is resumed; nothing is lost and nothing runs twice. */
export class Session {
  readonly #connection: Connection;
  readonly #link: SessionLink;
  readonly #listeners = new Set<(status: Status) => void>();
  readonly #asked = new Map<number, Waiting<Answer>>();
  readonly #ended: (() => void)[] = [];
  #watch: Watch | undefined;

  /** @internal */
  constructor(connectionFor: (handlers: ConstructorParameters<typeof Connection>[3]) => Connection, signal?: AbortSignal) {
    this.#connection = connectionFor({
      deliver: (events) => this.#deliver(events),
      changed: (status) => {
        for (const listener of [...this.#listeners]) guarded(() => listener(status));
      },
      ended: (error) => this.#end(error),
    });
    this.#link = new SessionLink(this.#connection);
    const close = (): void => void this.close();
    signal?.addEventListener("abort", close, { once: true });
    this.#ended.push(() => signal?.removeEventListener("abort", close));
    if (signal?.aborted) close();
    // Browsers announce that there is a network again.
    const target = globalThis as Partial<Pick<EventTarget, "addEventListener" | "removeEventListener">>;
    const hurry = (): void => this.#connection.hurry();
    target.addEventListener?.("online", hurry);
    this.#ended.push(() => target.removeEventListener?.("online", hurry));
  }

  /** The name of the default model. */
  get model(): string {
    return this.#connection.model;
  }

  /** The capabilities of each model by name. */
  get models(): Readonly<Record<string, Capabilities>> {
    return this.#connection.models;
  }

  /** The capabilities of the default model. */
  get capabilities(): Capabilities {
    return this.#connection.models[this.model]!;
  }

  /** `lost` while the client reconnects; `closed` when the session has ended. */
  get status(): Status {
    return this.#connection.status;
  }

  /** Why the session has ended. */
  get error(): AgentflowError | undefined {
    return this.#connection.error;
  }

  /** Calls `listener` when the status changes. Returns a function that ends this. */
  onStatus(listener: (status: Status) => void): () => void {
    const one = (status: Status): void => listener(status);
    this.#listeners.add(one);
    return () => void this.#listeners.delete(one);
  }

  /** A new root state. */
  state(options: StateOptions = {}): State {
    const number = this.#link.nextNumber();
    this.#link.send(openOp(number, options));
    return new State(this.#link, number, [], options.model ?? this.model);
  }

  /** Runs a graph. */
  submit(graph: Graph, options: SubmitOptions = {}): Run {
    const outputs = options.outputs ?? graph.variables;
    for (const output of outputs) {
      if (!graph.owns(output)) throw new ForeignState(`${output.name} does not belong to the graph`);
    }
    const base = this.#link.reserve(graph.size);
    this.#link.send(graph.submission(base, outputs, options), graph.images);
    const root = new State(this.#link, base, [], graph.root.model ?? this.model);
    const done = this.#link.reached(root, GRAPH_TICKET);
    done.catch(() => {}); // a run that is not awaited reports its errors through its variables
    const run = new Run(this.#link, graph, root, done, outputs);
    // It is delayed until the run has ended and all outputs have arrived.
    this.#link.send({ op: "close", state: base });
    return run;
  }

  /**
   * The embedding of a text, or those of several texts in their order. Many texts are sent in parts, so that they
   * take bounded memory and leave room for others' requests. Rejects with `NotSupported` where no model makes
   * embeddings, `UnknownModel` for another one, `PromptTooLong` for a text that is longer than the model takes,
   * `BadArgument` for an empty one.
   */
  embed(text: string, options?: EmbedOptions): Promise<Float32Array>;
  embed(texts: readonly string[], options?: EmbedOptions): Promise<Float32Array[]>;
  async embed(texts: string | readonly string[], options: EmbedOptions = {}): Promise<Float32Array | Float32Array[]> {
    const fields = embedFields(this.capabilities, options);
    const isOne = typeof texts === "string";
    const open = (): State => this.state({ program: "embed" });
    const vectors = await embedTexts(open, isOne ? [texts] : texts, fields, options.signal);
    return isOne ? vectors[0]! : vectors;
  }

  /** The counters of the server. */
  async stats(): Promise<Stats> {
    const reply = (await this.#ask((ticket) => ({ op: "getstats", ticket }))) as StatsReplyEvent;
    if (reply.error) throw receivedError(reply.error);
    return reply.stats!;
  }

  /** The unfinished part of the session: its open states, and what waits or runs in them. */
  async graph(): Promise<LiveGraph> {
    return (await this.#graphs(false))[0]!;
  }

  /** The graphs of all sessions and programs of this key's tenant, this session's first. Each has its own numbers. */
  graphs(): Promise<LiveGraph[]> {
    return this.#graphs(true);
  }

  /**
   * The text of a node of the radix tree, if it belongs to this key's tenant: its first 500 tokens. Only while a
   * `watch` lasts, whose nodes have these ids.
   */
  async peek(node: number): Promise<{ text: string; numTokens: number }> {
    const reply = (await this.#ask((ticket) => ({ op: "peek", ticket, node }))) as PeekedEvent;
    if (reply.error) throw receivedError(reply.error);
    return { text: reply.text ?? "", numTokens: reply.num_tokens ?? 0 };
  }

  /**
   * Follows the scheduler, the radix tree and the programs, until the loop is left or `signal` aborts. A session has one watch:
   * a second one ends the first. A slow loop gets several changes as one. While the engine restarts, there is only
   * an `error`.
   */
  watch(options: WatchOptions = {}): AsyncIterableIterator<Watched> {
    this.#watch?.end();
    const watch = new Watch(
      options,
      (op) => {
        if (!this.error) this.#connection.send(op);
      },
      () => this.#connection.nextTicket(),
      () => {
        if (this.#watch === watch) this.#watch = undefined;
      },
    );
    this.#watch = watch;
    watch.request();
    if (this.error) watch.end(this.error);
    return watch;
  }

  /** Ends the session: what still runs is cancelled. */
  async close(): Promise<void> {
    await this.#connection.leave(new StateClosed("the session was closed", { reason: "ended" }));
  }

  async #graphs(ofTenant: boolean): Promise<LiveGraph[]> {
    const asked = ofTenant ? { of_tenant: true } : {};
    const reply = (await this.#ask((ticket) => ({ op: "getgraph", ticket, ...asked }))) as GraphReplyEvent;
    if (reply.error) throw receivedError(reply.error);
    return [reply.graph!, ...(reply.others ?? [])];
  }

  #ask(opOf: (ticket: number) => Op): Promise<Answer> {
    return new Promise((resolve, reject) => {
      const ticket = this.#connection.nextTicket();
      this.#connection.send(opOf(ticket));
      this.#asked.set(ticket, { resolve, reject });
    });
  }

  #deliver(events: readonly ServerEvent[]): void {
    for (const event of events) {
      switch (event.event) {
        case "statsreply":
        case "graphreply":
        case "peeked":
          this.#asked.get(event.ticket)?.resolve(event);
          this.#asked.delete(event.ticket);
          break;
        case "watched":
          this.#watch?.receive(event.ticket, event);
          break;
        default:
          this.#link.receive(event);
      }
    }
  }

  #end(error: AgentflowError): void {
    this.#link.end(error);
    for (const { reject } of this.#asked.values()) reject(error);
    this.#asked.clear();
    this.#watch?.end(error);
    for (const undo of this.#ended) undo();
  }
}

/** The states and variables of a session that may still change. */
class SessionLink implements RunLink {
  readonly isRecording = false;
  readonly #connection: Connection;
  readonly #states = new Map<number, State>();
  readonly #variables = new Map<number, Variable>();
  readonly #tickets = new Map<State, { next: number; reached: number; waiting: [number, Waiting<void>][] }>();
  readonly #uploads: Uploads;
  #lastNumber = 0;

  constructor(connection: Connection) {
    this.#connection = connection;
    this.#uploads = new Uploads((op) => connection.send(op));
  }

  nextNumber(): number {
    return this.reserve(1);
  }

  /** The first of so many new numbers. */
  reserve(count: number): number {
    const first = this.#lastNumber + 1;
    this.#lastNumber += count;
    return first;
  }

  send(op: Op, images?: Iterable<Image>): void {
    for (const one of op.op === "submit" ? op.ops : [op]) this.#checkModel(one);
    if (images) this.#uploads.send(images, this.#connection.frameBytes);
    this.#connection.send(op);
  }

  prepare(ops: readonly Op[], images: readonly Image[]): void {
    this.#uploads.send(images, this.#connection.frameBytes);
    this.#connection.check(ops);
  }

  want(variable: number, how: "stream" | "value"): void {
    try {
      this.send({ op: "want", var: variable, how });
    } catch {
      // Only advice: what ended the session, the variable reports.
    }
  }

  addState(state: State): void {
    this.#states.set(state.number, state);
  }

  addVariable(variable: Variable): void {
    this.#variables.set(variable.number, variable);
  }

  addPlace(): void {}

  isOpen(state: State): boolean {
    return this.#connection.isOpen(state.number);
  }

  dropState(state: State): void {
    if (!this.#tickets.get(state)?.waiting.length) this.#forget(state);
  }

  cancel(number: number, options?: CancelOptions): void {
    this.send(cancelOp(number, options));
  }

  done(state: State): Promise<void> {
    if (state.error) return Promise.reject(state.error);
    const ticket = this.#ticketsOf(state).next++;
    this.send({ op: "await", state: state.number, ticket });
    return this.reached(state, ticket);
  }

  /** Resolves when the state reaches the ticket. */
  reached(state: State, ticket: number): Promise<void> {
    return new Promise((resolve, reject) => {
      this.#ticketsOf(state).waiting.push([ticket, { resolve, reject }]);
    });
  }

  receive(event: ServerEvent): void {
    switch (event.event) {
      case "delta":
        this.#variables.get(event.var)?.receive(event.text, event.reasoning, event.reasoning_at);
        break;
      case "value":
      case "varfailed": {
        const variable = this.#variables.get(event.var);
        if (!variable) break;
        if (event.event === "value") variable.finish(event);
        else variable.fail(receivedError(event.error));
        this.#variables.delete(event.var);
        if (!this.isOpen(variable.state)) this.dropState(variable.state);
        break;
      }
      case "reached":
      case "statefailed": {
        const state = this.#states.get(event.state);
        if (!state) break;
        const error = event.event === "statefailed" ? receivedError(event.error) : undefined;
        if (error) state.fail(error);
        const tickets = this.#ticketsOf(state);
        const isMet = ([ticket]: [number, unknown]): boolean =>
          event.event === "statefailed" || ticket <= event.ticket;
        for (const [, waiting] of tickets.waiting.filter(isMet)) {
          if (error) waiting.reject(error);
          else waiting.resolve();
        }
        tickets.waiting = tickets.waiting.filter((one) => !isMet(one));
        if (!this.isOpen(state)) this.#forget(state);
        break;
      }
      default:
    }
  }

  /** The session has ended: nothing more will arrive. */
  end(error: AgentflowError): void {
    for (const variable of this.#variables.values()) variable.fail(error);
    for (const state of this.#states.values()) state.fail(error);
    for (const { waiting } of this.#tickets.values()) for (const [, one] of waiting) one.reject(error);
    this.#variables.clear();
    this.#states.clear();
    this.#tickets.clear();
  }

  #checkModel(op: Op): void {
    const { models } = this.#connection;
    if ((op.op !== "open" && op.op !== "fork") || !op.model || Object.hasOwn(models, op.model)) return;
    const known = Object.keys(models).join(", ");
    throw new UnknownModel(`the session has no model ${JSON.stringify(op.model)} (it has: ${known})`, { param: "model" });
  }

  #ticketsOf(state: State): { next: number; reached: number; waiting: [number, Waiting<void>][] } {
    let tickets = this.#tickets.get(state);
    if (!tickets) this.#tickets.set(state, (tickets = { next: 1, reached: 0, waiting: [] }));
    return tickets;
  }

  #forget(state: State): void {
    this.#states.delete(state.number);
    this.#tickets.delete(state);
  }
}

/** The watch of a session. */
class Watch implements AsyncIterableIterator<Watched> {
  readonly #options: WatchOptions;
  readonly #send: (op: Op) => void;
  readonly #newTicket: () => number;
  readonly #left: () => void;
  #ticket = 0;
  #pending: Watched | undefined;
  #readers: (() => void)[] = [];
  #hasEnded = false;
  #error: AgentflowError | undefined;
  readonly #abort = (): void => void this.return();

  constructor(options: WatchOptions, send: (op: Op) => void, newTicket: () => number, left: () => void) {
    this.#options = options;
    this.#send = send;
    this.#newTicket = newTicket;
    this.#left = left;
    options.signal?.addEventListener("abort", this.#abort, { once: true });
    if (options.signal?.aborted) this.#hasEnded = true;
  }

  /** Asks for the events. */
  request(): void {
    if (this.#hasEnded) return;
    this.#ticket = this.#newTicket();
    const { steps, tree, graphs, intervalS, maxNodes } = this.#options;
    const op: WatchOp = { op: "watch", ticket: this.#ticket };
    if (steps !== undefined) op.steps = steps;
    if (tree !== undefined) op.tree = tree;
    if (graphs !== undefined) op.graphs = graphs;
    if (intervalS !== undefined) op.interval_s = intervalS;
    if (maxNodes !== undefined) op.max_nodes = maxNodes;
    this.#send(op);
  }

  receive(ticket: number, watched: Watched): void {
    if (ticket !== this.#ticket || this.#hasEnded) return; // of an earlier watch
    if (watched.error && watched.error.code !== EngineDown.code) {
      this.end(receivedError(watched.error));
      this.#left();
      return;
    }
    this.#pending = this.#pending ? mergeWatched(this.#pending, watched) : watched;
    this.#wake();
  }

  /** No more events will come. */
  end(error?: AgentflowError): void {
    if (this.#hasEnded) return;
    this.#hasEnded = true;
    this.#error = error;
    this.#options.signal?.removeEventListener("abort", this.#abort);
    this.#wake();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async next(): Promise<IteratorResult<Watched>> {
    for (;;) {
      if (this.#pending) {
        const value = this.#pending;
        this.#pending = undefined;
        return { done: false, value };
      }
      if (this.#error) {
        const error = this.#error;
        this.#error = undefined;
        throw error;
      }
      if (this.#hasEnded) return { done: true, value: undefined };
      await new Promise<void>((resolve) => this.#readers.push(resolve));
    }
  }

  return(): Promise<IteratorResult<Watched>> {
    if (!this.#hasEnded) {
      this.end();
      this.#pending = undefined;
      this.#left();
      this.#send({ op: "unwatch" });
    }
    return Promise.resolve({ done: true, value: undefined });
  }

  #wake(): void {
    const readers = this.#readers;
    this.#readers = [];
    for (const resolve of readers) resolve();
  }
}
