// Variables: texts that grow while they are generated, and references to them.

import type { AgentflowError } from "./agentflow_error.js";
import { announce, forget, type Due } from "./changes.js";
import { countCodePoints, takeCodePoints } from "./code_points.js";
import { DataDependent } from "./errors.js";
import type { PassedOver, Transform, Usage, ValueEvent } from "./protocol.js";
import { ReplySoFar, type Reply } from "./reply.js";
import type { State } from "./state.js";

/** Stands for a variable's value in the text of another op, after transforms. */
export class Reference {
  /** @internal */
  constructor(
    /** @internal */ readonly target: () => Variable,
    /** @internal */ readonly transforms: Transform[],
  ) {}

  /** Without white space at both ends. */
  strip(): Reference {
    return this.#with(["strip"]);
  }

  /** In lower case. */
  lower(): Reference {
    return this.#with(["lower"]);
  }

  /** In upper case. */
  upper(): Reference {
    return this.#with(["upper"]);
  }

  /** The first line that is not empty. */
  firstLine(): Reference {
    return this.#with(["first_line"]);
  }

  /** A part of a JSON value, such as `json("cities.0.name")`. */
  json(path: string): Reference {
    return this.#with(["json", path]);
  }

  /** The first group of the pattern's first match, or all of it. The pattern is one of Python. */
  regex(pattern: string): Reference {
    return this.#with(["regex", pattern]);
  }

  /** The items of a list, one a line, or one of them; a negative index counts from the end. */
  items(kind: "numbered" | "bulleted" | "comma" = "numbered", index?: number): Reference {
    return this.#with(["items", index === undefined ? kind : `${kind}.${index}`]);
  }

  /** The text within the first `<tag>…</tag>`. */
  xml(tag: string): Reference {
    return this.#with(["xml", tag]);
  }

  /** A part of a YAML value, such as `yaml("cities.0.name")`. */
  yaml(path = ""): Reference {
    return this.#with(["yaml", path]);
  }

  /** The first decimal number, as JSON writes it. */
  firstNumber(): Reference {
    return this.#with(["number"]);
  }

  /** A date in ISO's format. `format` is one of Python's `strptime`; by default, the text is in ISO's format too. */
  date(format = ""): Reference {
    return this.#with(["date", format]);
  }

  /** The text, without white space at its ends, which must be one of the values. */
  enum(values: readonly string[]): Reference {
    return this.#with(["enum", JSON.stringify(values)]);
  }

  #with(transform: Transform): Reference {
    return new Reference(this.target, [...this.transforms, transform]);
  }
}

/** A span of `[position, length]` in code points; `utf16Spans` converts spans for `slice`. */
export type Span = readonly [at: number, length: number];

/** Called with a variable and the text that was added since the last call. */
export type ChangeListener = (variable: Variable, added: string) => void;

/**
 * A text that an op generates, selects, sets or reads.
 *
 * `await variable` gives the complete text, or throws the error. `for await (const piece of variable)` gives
 * the pieces, from the first one, also if the text is complete already; a slow loop gets larger pieces.
 *
 * A variable is thenable: an `async` function that returns it, returns its text.
 */
export class Variable extends Reference implements PromiseLike<string>, AsyncIterable<string> {
  readonly name: string;
  /** The state of the op. */
  readonly state: State;
  /** The variable's number in its session or graph. */
  readonly number: number;
  /** @internal Whether a text refers to it. Otherwise the server assumes that the program awaits it. */
  isUsed = false;
  #wanted: "stream" | "value" | undefined;
  #pieces: string[] = [];
  #joined = "";
  #reasoning = "";
  #numReasoning = 0; // in code points
  #numJoined = 0;
  #value: ValueEvent | undefined;
  #error: AgentflowError | undefined;
  #onEnd: (() => void)[] = [];
  #onAny: (() => void)[] = [];
  #listeners = new Set<Listener>();
  #reply: ReplySoFar | undefined;
  #numReplied = 0;

  /** @internal */
  constructor(state: State, number: number, name: string) {
    super(() => this, []);
    this.state = state;
    this.number = number;
    this.name = name;
  }

  /** The text so far. Reading it after each piece of a long text is slow: use `onChange` or a loop. */
  get text(): string {
    if (this.#numJoined < this.#pieces.length) {
      this.#joined += this.#pieces.slice(this.#numJoined).join("");
      this.#numJoined = this.#pieces.length;
    }
    return this.#joined;
  }

  /** Whether the text is complete, or will not be, because of `error`. */
  get done(): boolean {
    return this.#value !== undefined || this.#error !== undefined;
  }

  /** Why there is no value. */
  get error(): AgentflowError | undefined {
    return this.#error;
  }

  /** The tokens that it took, when it is done. */
  get usage(): Usage | undefined {
    return this.#value?.usage;
  }

  /** `eos`, `stop` or `length`; of a select `choice`; of others `set`, `read` or `provided`. */
  get finishReason(): string | undefined {
    return this.#value?.finish_reason;
  }

  /** The model that answered, if the session chose among several. */
  get model(): string | undefined {
    return this.#value?.model || undefined;
  }

  /** The models that were asked before it, and why they did not answer. */
  get passedOver(): readonly PassedOver[] {
    return this.#value?.passed_over ?? [];
  }

  /** Of a select or decide: by log-probabilities, by a provider's endpoint, or by the text that the model wrote. */
  get decidedBy(): ValueEvent["decided_by"] | undefined {
    return this.#value?.decided_by ?? undefined;
  }

  /** Of a select: each choice with the score that its method compares. */
  get choices(): Readonly<Record<string, number>> | undefined {
    return this.#value?.choices ?? undefined;
  }

  /** The log-probability of each token, if the op requested them. */
  get logprobs(): NonNullable<ValueEvent["logprobs"]> | undefined {
    return this.#value?.logprobs ?? undefined;
  }

  /** The text of each token that `logprobs` has an entry for. */
  get tokens(): readonly string[] | undefined {
    return this.#value?.tokens ?? undefined;
  }

  /**
   * What a reasoning model thought before the text: so far with `streamReasoning`, otherwise when it is done.
   * Empty if it did not.
   */
  get reasoning(): string {
    return this.#value ? (this.#value.reasoning ?? "") : this.#reasoning;
  }

  /** For each token the likeliest ones at its position, if the op requested them. */
  get topLogprobs(): NonNullable<ValueEvent["top_logprobs"]> | undefined {
    return this.#value?.top_logprobs ?? undefined;
  }

  /** The parts of the text that the grammar determined, and that were not sampled. */
  get forced(): readonly Span[] | undefined {
    return (this.#value as { forced?: readonly Span[] } | undefined)?.forced ?? undefined;
  }

  /** Of a gen with `reply`: the prose and the tool calls so far. */
  get reply(): Reply {
    this.#reply ??= new ReplySoFar();
    for (; this.#numReplied < this.#pieces.length; this.#numReplied++) {
      this.#reply.push(this.#pieces[this.#numReplied]!);
    }
    return this.#reply.now();
  }

  then<Result1 = string, Result2 = never>(
    onfulfilled?: ((value: string) => Result1 | PromiseLike<Result1>) | null,
    onrejected?: ((reason: unknown) => Result2 | PromiseLike<Result2>) | null,
  ): Promise<Result1 | Result2> {
    return this.#ended().then(onfulfilled, onrejected);
  }

  catch<Result = never>(
    onrejected?: ((reason: unknown) => Result | PromiseLike<Result>) | null,
  ): Promise<string | Result> {
    return this.#ended().catch(onrejected);
  }

  finally(onfinally?: (() => void) | null): Promise<string> {
    return this.#ended().finally(onfinally);
  }

  async *[Symbol.asyncIterator](): AsyncIterator<string> {
    this.#checkLive();
    this.#want("stream");
    for (let next = 0; ; ) {
      if (next < this.#pieces.length) {
        const piece = next + 1 === this.#pieces.length ? this.#pieces[next]! : this.#pieces.slice(next).join("");
        next = this.#pieces.length;
        yield piece;
      } else if (this.#error) {
        throw this.#error;
      } else if (this.#value) {
        return;
      } else {
        await new Promise<void>((resolve) => this.#onAny.push(resolve));
      }
    }
  }

  /**
   * Calls `listener` when the variable has changed: at most once per frame of the screen, with the text that was
   * added since the last call. The first call has the text that is already there. Returns a function that ends
   * this.
   */
  onChange(listener: ChangeListener): () => void {
    const one = new Listener(this, listener);
    this.#listeners.add(one);
    if (this.#pieces.length || this.#reasoning || this.done) announce(one);
    return () => {
      this.#listeners.delete(one);
      forget(one);
    };
  }

  /** @internal */
  piecesFrom(index: number): readonly string[] {
    return index ? this.#pieces.slice(index) : this.#pieces;
  }

  /** @internal */
  receive(text: string, reasoning = "", reasoningAt = 0): void {
    if (reasoning) {
      if (reasoningAt !== this.#numReasoning) this.#reasoning = takeCodePoints(this.#reasoning, reasoningAt);
      this.#reasoning += reasoning;
      this.#numReasoning = reasoningAt + countCodePoints(reasoning);
    }
    if (text) this.#pieces.push(text);
    if (text || reasoning) this.#changed();
  }

  /** @internal */
  finish(value: ValueEvent): void {
    if (value.text) this.#pieces.push(value.text);
    this.#value = value;
    this.#changed();
    this.#end();
  }

  /** @internal */
  fail(error: AgentflowError): void {
    if (this.done) return;
    this.#error = error;
    this.#changed();
    this.#end();
  }

  async #ended(): Promise<string> {
    this.#checkLive();
    if (this.isUsed) this.#want("value");
    if (!this.done) await new Promise<void>((resolve) => this.#onEnd.push(resolve));
    if (this.#error) throw this.#error;
    return this.text;
  }

  #want(how: "stream" | "value"): void {
    if (this.done || this.#wanted === how || this.#wanted === "stream") return;
    this.#wanted = how;
    this.state.want(this, how);
  }

  #checkLive(): void {
    if (this.state.isRecorded) {
      throw new DataDependent(`${this.name} belongs to a graph: submit it and use run.variable(…)`);
    }
  }

  #changed(): void {
    for (const listener of this.#listeners) announce(listener);
    const waiting = this.#onAny;
    this.#onAny = [];
    for (const resolve of waiting) resolve();
  }

  #end(): void {
    const waiting = this.#onEnd;
    this.#onEnd = [];
    for (const resolve of waiting) resolve();
  }
}

class Listener implements Due {
  #next = 0;

  constructor(
    private readonly variable: Variable,
    private readonly listener: ChangeListener,
  ) {}

  run(): void {
    const pieces = this.variable.piecesFrom(this.#next);
    this.#next += pieces.length;
    this.listener(this.variable, pieces.length === 1 ? pieces[0]! : pieces.join(""));
  }
}
