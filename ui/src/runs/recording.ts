// The content of a recording: its runs, their fork trees, and the calls of each state.
//
// `RecordingReader` takes the lines of docs/guides/recording.md one by one, of a file or of this page's session. A
// line that contradicts earlier ones, or that this version does not know, is counted and left out.
import { shortened, startOf } from "../text/shorten";

export const FORMAT_VERSION = 2;

export interface Usage {
  readonly prompt_tokens: number;
  readonly cached_tokens: number;
  readonly output_tokens: number;
  readonly forced_tokens?: number;
  readonly miss_reason?: string;
}

export interface RecordedError {
  readonly code: string;
  readonly message: string;
  /** The code at the end of the chain of causes. */
  readonly origin: string;
}

export interface Header {
  readonly recording: number;
  readonly agentflow: string;
  readonly started: string;
  readonly model: string;
}

export type Ending = "complete" | "failed" | "cancelled";

/** A gen, a select, a decision, or another op that declares a variable. Times are seconds since the start of the recording.
 *
 * `sentS`: the op was sent. `readyS`: everything before it in its state was done, so that it could begin; set by
 * `finish`. `firstS`, `endS`: its first text and its end; null if the recording has none. */
export interface Call {
  readonly number: number;
  readonly kind: string;
  readonly name: string;
  /** The text is the notation of a reply. */
  readonly isReply: boolean;
  readonly state: RunState;
  readonly sentS: number;
  readyS: number;
  firstS: number | null;
  endS: number | null;
  text: string;
  usage: Usage | null;
  finishReason: string | null;
  choices: Readonly<Record<string, number>> | null;
  error: RecordedError | null;
  /** Its place in the content of its state: what stands before it there is in its prompt. */
  readonly place: number;
}

/** A piece of a state's content: a turn's beginning or end, text, an image or a video, a variable's value, or what a call appends. */
export type Piece =
  | { readonly role: string }
  | { readonly end: true }
  | { readonly text: string }
  | { readonly image: string }
  | { readonly video: string }
  | { readonly variable: number; readonly transforms: readonly unknown[] };

/** What a state did, in order: as much as the times need. */
type Step =
  | { readonly call: Call }
  | { readonly references: readonly number[] }
  | { readonly children: readonly RunState[] };

export interface RunState {
  readonly number: number;
  readonly run: Run;
  /** Its number among the forks of its parent, from 0. */
  readonly index: number;
  readonly parent: RunState | null;
  readonly forks: RunState[];
  readonly calls: Call[];
  readonly steps: Step[];
  /** What was appended to it, after the first `contentBefore` pieces of its parent's. */
  readonly content: Piece[];
  readonly contentBefore: number;
  readonly startS: number;
  endS: number;
  /** The first text that was appended to it, shortened. */
  firstText: string;
  error: RecordedError | null;
  isCancelled: boolean;
  /** The exception with which its program failed, in words. */
  failure: string | null;
  /** When all its calls so far were done; set by `finish`. */
  doneS: number;
}

export interface Run {
  readonly index: number;
  /** The label of its root state, or the program without one. */
  readonly program: string;
  readonly root: RunState;
  /** Parents before their forks. */
  readonly states: RunState[];
}

/** The sums of all calls that run on the model. */
export interface Totals {
  readonly states: number;
  readonly calls: number;
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly outputTokens: number;
}

/** A span of time in seconds. */
export interface Span {
  readonly beginS: number;
  readonly toS: number;
}

/** Gens, selects and decisions run on the model; the other variables take no time of it. */
export function isModelCall(call: Call): boolean {
  return call.kind === "decide" || isContent(call);
}

/** Whether the state has the variable's text where it was declared. */
function isContent(call: Call): boolean {
  return call.kind === "gen" || call.kind === "select";
}

/** The kinds of ops that are of the session, not of a state, and show nothing. */
const OF_SESSION: ReadonlySet<unknown> = new Set([
  "upload",
  "release",
  "provide",
  "want",
  "getstats",
  "getgraph",
  "watch",
  "unwatch",
  "peek",
]);

type Json = Readonly<Record<string, unknown>>;
const MAX_FIRST_TEXT = 200;

let numReaders = 0;

export class RecordingReader {
  /** Tells it from all other readers. */
  readonly id = ++numReaders;
  header: Header | null = null;
  ending: Ending | null = null;
  lost: RecordedError | null = null;
  readonly runs: Run[] = [];
  /** The time of the last line. */
  lastS = 0;
  /** Lines that could be read, and the numbers of the first few that could not. */
  numRead = 0;
  numUnread = 0;
  firstUnread: number | null = null;
  private numLines = 0;
  // Kept while reading: a long recording has too many states to go through them in one task.
  private readonly sums = { states: 0, calls: 0, promptTokens: 0, cachedTokens: 0, outputTokens: 0 };
  private beginS = Infinity;
  private toS = 0;
  private readonly states = new Map<number, RunState>();
  private readonly calls = new Map<number, Call>();
  private readonly lengths = new Map<Call, number>(); // of its text, in code points

  /** Reads one line as text; false if it could not be read. */
  readText(line: string): boolean {
    let value: unknown;
    try {
      value = JSON.parse(line);
    } catch {
      value = null;
    }
    return this.read(value);
  }

  /** Reads one line; false if it could not be read. */
  read(line: unknown): boolean {
    this.numLines += 1;
    const isRead =
      isObject(line) && (this.numLines === 1 && "recording" in line ? this.begin(line) : this.entry(line));
    if (isRead) this.numRead += 1;
    else {
      this.numUnread += 1;
      this.firstUnread ??= this.numLines;
    }
    return isRead;
  }

  /** Computes when each call could begin, from what the recording has so far. May be called again later. */
  finish(): void {
    for (const _ of this.finishing());
  }

  get totals(): Totals {
    return this.sums;
  }

  /** From the first op to the last event of the runs. */
  get span(): Span {
    if (this.runs.length === 0) return { beginS: 0, toS: 1 };
    return { beginS: this.beginS, toS: Math.max(this.toS, this.beginS + 1e-3) };
  }

  /** Whether no call waits or runs any more. */
  get isIdle(): boolean {
    for (const call of this.calls.values()) {
      if (call.endS === null && !call.state.isCancelled && call.state.error === null) return false;
    }
    return true;
  }

  /** The call that declares a variable. */
  callOf(variable: number): Call | null {
    return this.calls.get(variable) ?? null;
  }

  /** `finish` in small parts, for callers that pause between them. */
  *finishing(): Generator<void> {
    for (const run of this.runs) {
      for (const state of run.states) {
        this.finishState(state);
        yield;
      }
    }
  }

  private finishState(state: RunState): void {
    let doneS = state.parent === null ? state.startS : state.doneS;
    for (const step of state.steps) {
      if ("call" in step) {
        const { call } = step;
        call.readyS = Math.max(call.sentS, doneS);
        // Its end is known, so it began before that, whatever the times of others say.
        if (call.endS !== null) call.readyS = Math.min(call.readyS, call.firstS ?? call.endS, call.endS);
        doneS = Math.max(doneS, call.endS ?? call.readyS);
      } else if ("references" in step) {
        for (const number of step.references) doneS = Math.max(doneS, this.calls.get(number)?.endS ?? 0);
      } else {
        for (const child of step.children) child.doneS = doneS;
      }
    }
    state.doneS = doneS;
  }

  private begin(line: Json): boolean {
    const { recording, agentflow, started, capabilities } = line;
    if (typeof recording !== "number") return false;
    // Version 1 had the capabilities of a single model.
    const model = isObject(capabilities) ? capabilities["model"] : line["model"];
    this.header = {
      recording,
      agentflow: textOf(agentflow),
      started: textOf(started),
      model: textOf(model),
    };
    return true;
  }

  private entry(line: Json): boolean {
    const atS = line["at_s"];
    if (typeof atS !== "number" || !(atS >= 0) || !Number.isFinite(atS)) return false;
    const { sent, received, refused, lost, ending } = line;
    const isRead =
      (isObject(sent) && this.send(sent, atS)) ||
      (isObject(received) && this.receive(received, atS)) ||
      (isObject(refused) && this.refuse(line["ops"], errorOf(refused))) ||
      this.end(lost, ending);
    if (isRead) this.lastS = Math.max(this.lastS, atS);
    return isRead;
  }

  private end(lost: unknown, ending: unknown): boolean {
    if (isObject(lost)) this.lost = errorOf(lost);
    else if (ending === "complete" || ending === "failed" || ending === "cancelled") this.ending = ending;
    else return false;
    return true;
  }

  private refuse(ops: unknown, error: RecordedError): boolean {
    for (const op of Array.isArray(ops) ? (ops as unknown[]) : []) {
      const state = isObject(op) ? this.states.get(numberOf(op["state"])) : undefined;
      if (state !== undefined) state.error ??= error;
    }
    return true;
  }

  private send(op: Json, atS: number): boolean {
    const kind = op["op"];
    if (kind === "submit") return this.submit(op, atS);
    if (kind === "open") return this.open(numberOf(op["state"]), op, atS);
    if (OF_SESSION.has(kind)) return true;
    const state = this.states.get(numberOf(op["state"]));
    // A limit may be for the whole session, and a state may be named after its graph was closed.
    if (state === undefined)
      return kind === "limit" || kind === "close" || kind === "cancel" || kind === "await";
    if (kind !== "close" && kind !== "seal") this.extend(state, atS);
    return this.apply(op, kind, state, atS, 0);
  }

  private open(number: number, op: Json, atS: number): boolean {
    if (!(number > 0) || this.states.has(number)) return false;
    const run: Run = {
      index: this.runs.length,
      program: textOf(op["label"]) || textOf(op["program"]),
      root: null as unknown as RunState,
      states: [],
    };
    Object.assign(run, { root: this.newState(number, run, null, atS) });
    this.runs.push(run);
    return true;
  }

  /** A graph numbers its states and variables from 1: n is the session's `base` + n. */
  private submit(op: Json, atS: number): boolean {
    const base = numberOf(op["state"]) - 1;
    const ops = Array.isArray(op["ops"]) ? op["ops"].filter(isObject) : [];
    const [first] = ops;
    if (first === undefined || !this.open(base + 1, first, atS)) return false;
    for (const one of ops.slice(1)) {
      const state = this.states.get(numberOf(one["state"]) + base);
      if (state !== undefined) this.apply(one, one["op"], state, atS, base);
    }
    return true;
  }

  private apply(op: Json, kind: unknown, state: RunState, atS: number, base: number): boolean {
    switch (kind) {
      case "gen":
      case "select":
      case "decide":
      case "set":
      case "read":
      case "embed":
      case "done":
      case "expect":
        if (kind === "set") this.refer(op, state, base);
        return this.declare(op, kind, state, atS, base);
      case "text":
        this.refer(op, state, base);
        for (const part of partsOf(op)) {
          if (typeof part === "string") state.content.push({ text: part });
          else if (isObject(part)) {
            const transforms = Array.isArray(part["transforms"]) ? (part["transforms"] as unknown[]) : [];
            state.content.push({ variable: numberOf(part["var"]) + base, transforms });
          }
        }
        return true;
      case "begin":
        state.content.push({ role: textOf(op["role"]) });
        return true;
      case "end":
        state.content.push({ end: true });
        return true;
      case "image":
        state.content.push({ image: textOf(op["source"]) });
        return true;
      case "video":
        state.content.push({ video: textOf(op["source"]) });
        return true;
      case "converse":
        this.converse(messagesOf(op["conversation"]), state);
        return true;
      case "fork":
        return this.fork(op, state, atS, base);
      case "cancel":
        if (!state.isCancelled) for (const one of withForks(state)) one.isCancelled = true;
        if (isObject(op["failure"])) {
          const { type, message } = op["failure"];
          state.failure ??= lineOf([textOf(type), textOf(message)].filter(Boolean).join(": "));
        }
        return true;
      default:
        return typeof kind === "string";
    }
  }

  /** The turn of the assistant is open then: a new one, or the last message. */
  private converse(messages: readonly Json[], state: RunState): void {
    state.firstText ||= lineOf(textOf(messages[0]?.["content"]));
    for (const message of messages) {
      const calls = Array.isArray(message["tool_calls"]) ? message["tool_calls"].filter(isObject) : [];
      const said = calls.map((call) => `${textOf(call["name"])}(${textOf(call["arguments"])})`);
      const text = [textOf(message["content"]), ...said].filter(Boolean).join("\n");
      const images = Array.isArray(message["images"]) ? message["images"].filter(isObject) : [];
      state.content.push({ role: textOf(message["role"]) }, ...cutAt(text, images), { end: true });
    }
    if (messages.at(-1)?.["role"] === "assistant") state.content.pop();
    else state.content.push({ role: "assistant" });
  }

  private declare(op: Json, kind: string, state: RunState, atS: number, base: number): boolean {
    const number = numberOf(op["var"]) + base;
    if (!(number > 0) || this.calls.has(number)) return false;
    const call: Call = {
      number,
      kind,
      name: textOf(op["name"]),
      isReply: op["reply"] === true,
      state,
      sentS: atS,
      readyS: atS,
      firstS: null,
      endS: null,
      text: "",
      usage: null,
      finishReason: null,
      choices: null,
      error: null,
      place: state.content.length,
    };
    this.calls.set(number, call);
    if (isModelCall(call)) this.sums.calls += 1;
    if (isContent(call)) state.content.push({ variable: number, transforms: [] });
    state.calls.push(call);
    state.steps.push({ call });
    return true;
  }

  private refer(op: Json, state: RunState, base: number): void {
    const parts = partsOf(op);
    const references = parts.filter(isObject).map((part) => numberOf(part["var"]) + base);
    if (references.length > 0) state.steps.push({ references });
    const text = parts.find((part) => typeof part === "string");
    if (typeof text === "string") state.firstText ||= lineOf(text);
  }

  private fork(op: Json, state: RunState, atS: number, base: number): boolean {
    const numbers = Array.isArray(op["children"]) ? op["children"].map((one) => numberOf(one) + base) : [];
    if (numbers.length === 0 || numbers.some((number) => !(number > 0) || this.states.has(number)))
      return false;
    const children = numbers.map((number) => this.newState(number, state.run, state, atS));
    state.steps.push({ children });
    return true;
  }

  private newState(number: number, run: Run, parent: RunState | null, atS: number): RunState {
    const state: RunState = {
      number,
      run,
      index: parent?.forks.length ?? 0,
      parent,
      forks: [],
      calls: [],
      steps: [],
      content: [],
      contentBefore: parent?.content.length ?? 0,
      startS: atS,
      endS: atS,
      firstText: "",
      error: null,
      isCancelled: parent?.isCancelled ?? false,
      failure: null,
      doneS: atS,
    };
    parent?.forks.push(state);
    run.states.push(state);
    this.states.set(number, state);
    this.sums.states += 1;
    this.beginS = Math.min(this.beginS, atS);
    this.extend(state, atS);
    return state;
  }

  private extend(state: RunState, atS: number): void {
    state.endS = Math.max(state.endS, atS);
    this.toS = Math.max(this.toS, atS);
  }

  /** Adds the call's usage to the sums, or with -1 takes it out: a damaged file may have two values of a call. */
  private add(call: Call, sign: 1 | -1): void {
    if (call.usage === null || !isModelCall(call)) return;
    this.sums.promptTokens += sign * call.usage.prompt_tokens;
    this.sums.cachedTokens += sign * call.usage.cached_tokens;
    this.sums.outputTokens += sign * call.usage.output_tokens;
  }

  private receive(event: Json, atS: number): boolean {
    switch (event["event"]) {
      case "delta":
      case "value":
      case "varfailed":
        return this.receiveCall(event, atS);
      case "statefailed": {
        const state = this.states.get(numberOf(event["state"]));
        if (state === undefined) return false;
        state.error ??= errorOf(event["error"]);
        this.extend(state, atS);
        return true;
      }
      default:
        return typeof event["event"] === "string";
    }
  }

  private receiveCall(event: Json, atS: number): boolean {
    const call = this.calls.get(numberOf(event["var"]));
    if (call === undefined) return false;
    this.extend(call.state, atS);
    if (event["event"] === "varfailed") {
      call.error = errorOf(event["error"]);
      call.endS = atS;
      return true;
    }
    this.continueText(call, numberOf(event["at"]), textOf(event["text"]));
    call.firstS ??= atS;
    if (event["event"] === "value") {
      call.endS = atS;
      call.finishReason = typeof event["finish_reason"] === "string" ? event["finish_reason"] : null;
      this.add(call, -1);
      call.usage = usageOf(event["usage"]);
      this.add(call, 1);
      call.choices = isObject(event["choices"]) ? (event["choices"] as Record<string, number>) : null;
      this.lengths.delete(call);
    }
    return true;
  }

  /** The text from code point `at` on is `text`. Nearly always `at` is the end. */
  private continueText(call: Call, at: number, text: string): void {
    const length = this.lengths.get(call) ?? 0;
    if (at < length) call.text = [...call.text].slice(0, at).join("");
    call.text += text;
    this.lengths.set(call, Math.min(at, length) + codePoints(text));
  }
}

/** The state, its forks, their forks, and so on: parents first. */
export function* withForks(state: RunState): Generator<RunState, void> {
  const found = [state];
  for (const one of found) {
    yield one;
    for (const fork of one.forks) found.push(fork);
  }
}

function isObject(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function textOf(value: unknown): string {
  return typeof value === "string" ? value : "";
}

/** NaN for what is not a number, which no comparison accepts. */
function numberOf(value: unknown): number {
  return typeof value === "number" ? value : NaN;
}

function partsOf(op: Json): readonly unknown[] {
  return Array.isArray(op["parts"]) ? (op["parts"] as unknown[]) : [];
}

function errorOf(value: unknown): RecordedError {
  if (!isObject(value)) return { code: "", message: "", origin: "" };
  let origin = value;
  while (isObject(origin["cause"])) origin = origin["cause"];
  return { code: textOf(value["code"]), message: textOf(value["message"]), origin: textOf(origin["code"]) };
}

function usageOf(value: unknown): Usage | null {
  if (!isObject(value)) return null;
  const of = (name: string): number => (typeof value[name] === "number" ? value[name] : 0);
  return {
    prompt_tokens: of("prompt_tokens"),
    cached_tokens: of("cached_tokens"),
    output_tokens: of("output_tokens"),
    forced_tokens: of("forced_tokens"),
    miss_reason: textOf(value["miss_reason"]),
  };
}

function messagesOf(conversation: unknown): readonly Json[] {
  const messages = isObject(conversation) ? conversation["messages"] : null;
  return Array.isArray(messages) ? messages.filter(isObject) : [];
}

function lineOf(text: string): string {
  return shortened(startOf(text, 2 * MAX_FIRST_TEXT).replace(/\s+/g, " ").trim(), MAX_FIRST_TEXT + 1);
}

function codePoints(text: string): number {
  let number = 0;
  for (let i = 0; i < text.length; i++) {
    const code = text.charCodeAt(i);
    if (code >= 0xdc00 && code <= 0xdfff && i > 0 && isHigh(text.charCodeAt(i - 1))) continue;
    number += 1;
  }
  return number;
}

function isHigh(code: number): boolean {
  return code >= 0xd800 && code <= 0xdbff;
}

/** A message's text, and its images and videos before the characters that they name. */
function cutAt(text: string, images: readonly Json[]): Piece[] {
  if (images.length === 0) return [{ text }];
  const chars = [...text];
  const pieces: Piece[] = [];
  let done = 0;
  for (const placed of images) {
    const at = Math.min(chars.length, Math.max(done, numberOf(placed["at"])));
    if (at > done) pieces.push({ text: chars.slice(done, at).join("") });
    const source = isObject(placed["image"]) ? textOf(placed["image"]["source"]) : "";
    pieces.push(placed["video"] === true ? { video: source } : { image: source });
    done = at;
  }
  if (done < chars.length) pieces.push({ text: chars.slice(done).join("") });
  return pieces;
}
