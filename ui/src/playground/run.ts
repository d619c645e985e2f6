// A run of a program: what the server reports, as signals for the stage.
//
// A run may take several submissions. When a branch was cancelled, the rest goes on without it; when the server
// was lost, `goOn` runs what is missing. Texts that are complete are never generated again.
import { utf16Spans, type Run, type Session, type Usage, type Variable } from "agentflow-client";
import { computed, signal } from "@preact/signals";
import { announce } from "../app/announce";
import { sentenceOf } from "../app/session";
import { imageOf } from "../images/kept";
import { SentenceReader } from "../text/sentences";
import { callsOf, compile, promptLengths, type Compiled, type Lane } from "./compile";
import { DEFAULT_SAMPLING, type Program } from "./program";

export type CallStatus = "waiting" | "running" | "done" | "cancelled" | "failed";

/** Where more lanes run at once, only their ends are announced. */
const MAX_SPOKEN_LANES = 4;

/** One gen or select on the stage. It outlives the submissions of its run. */
export class Call {
  readonly status = signal<CallStatus>("waiting");
  readonly variable = signal<Variable | null>(null);
  readonly usage = signal<Usage | null>(null);
  readonly finishReason = signal<string | null>(null);
  readonly promptTokens = signal<string[] | null>(null);
  /** Of a select: the choices with the scores that decided. */
  readonly scores = signal<Readonly<Record<string, number>> | null>(null);
  /** UTF-16 spans of the text that the grammar forced. */
  readonly forced = signal<readonly [number, number][]>([]);
  readonly problem = signal<string | null>(null);

  constructor(
    readonly key: string,
    readonly path: string,
    readonly label: string,
  ) {}

  get text(): string {
    return this.variable.peek()?.text ?? "";
  }
}

/** Sums of what the server reported. `promptSoFar`, `outputSoFar`: an estimate for calls without a report, because
 * they are not complete, or never were. */
export interface Totals {
  prompt: number;
  cached: number;
  output: number;
  forced: number;
  promptSoFar: number;
  outputSoFar: number;
}

const CHARS_PER_TOKEN = 4;
const ESTIMATE_EVERY_MS = 500;

export type RunStatus = "running" | "done" | "stopped" | "failed";

export class ProgramRun {
  readonly status = signal<RunStatus>("running");
  readonly root = signal<Lane | null>(null);
  readonly problem = signal<string | null>(null);
  readonly cancelled = signal<ReadonlySet<string>>(new Set());
  readonly calls = new Map<string, Call>();
  readonly program: Program;
  readonly startedAt = performance.now();
  /** The seconds that it ran, without pauses before it went on; null while it runs for the first time. */
  readonly duration = signal<number | null>(null);
  readonly seed: number;
  /** Whether the model has turns. */
  readonly hasTurns: boolean;
  #beganAt = this.startedAt; // or went on
  readonly #numChanges = signal(0);
  #estimating: ReturnType<typeof setTimeout> | undefined;
  readonly #known = new Map<string, string>();
  #run: Run | null = null;
  #compiled: Compiled | null = null;
  #unsubscribe: (() => void)[] = [];

  readonly totals = computed<Totals>(() => {
    void this.#numChanges.value;
    const totals = { prompt: 0, cached: 0, output: 0, forced: 0, promptSoFar: 0, outputSoFar: 0 };
    const root = this.root.value;
    const lengths = new Map(root ? promptLengths(root, (key) => this.calls.get(key)?.text ?? "") : []);
    for (const call of this.calls.values()) {
      const usage = call.usage.peek();
      if (!usage) {
        if (call.text === "") continue;
        totals.promptSoFar += call.promptTokens.value?.length ?? tokensOf(lengths.get(call.key) ?? 0);
        totals.outputSoFar += tokensOf(call.text.length);
        continue;
      }
      totals.prompt += usage.prompt_tokens ?? 0;
      totals.cached += usage.cached_tokens ?? 0;
      totals.output += usage.output_tokens ?? 0;
      totals.forced += usage.forced_tokens ?? 0;
    }
    return totals;
  });
  /** Complete texts that reached their maximum of tokens. */
  readonly numCut = computed(
    () => [...this.calls.values()].filter((call) => call.finishReason.value === "length").length,
  );

  constructor(program: Program, session: Session) {
    this.program = structuredClone(program);
    this.hasTurns = session.capabilities.roles;
    this.seed = program.sampling.seed ?? Math.floor(Math.random() * 1_000_000);
    this.#submit(session);
  }

  /** Stops everything at once. */
  stop(): void {
    if (this.status.peek() !== "running") return;
    this.status.value = "stopped";
    this.#run?.cancel();
    this.#finish("Stopped.");
  }

  /** Cancels one branch and those below it; the others go on. */
  cancelBranch(path: string): void {
    if (this.status.peek() !== "running" || !this.#compiled || !this.#run) return;
    const lane = laneAt(this.#compiled.root, path);
    if (!lane || this.#isWhole(path)) return;
    this.cancelled.value = new Set([...this.cancelled.peek(), path]);
    this.#run.cancelBranch(lane.state);
    announce(`Branch ${lane.label} was cancelled.`);
  }

  /** Runs what is missing, after a failure or a stop. */
  goOn(session: Session): void {
    if (this.status.peek() === "running") return;
    this.status.value = "running";
    this.problem.value = null;
    this.#beganAt = performance.now();
    this.#submit(session);
  }

  #submit(session: Session): void {
    this.#release();
    this.#session = session;
    const compiled = compile(this.program, {
      known: this.#known,
      without: this.cancelled.peek(),
      hasTurns: this.hasTurns,
      imageOf,
      ...(session.capabilities.token_ids === false ? { maxTokenReads: 0 } : {}),
    });
    const { sampling = DEFAULT_SAMPLING } = this.program;
    this.#compiled = compiled;
    try {
      this.#run = session.submit(compiled.graph, { live: true, seed: sampling.seed ?? this.seed });
    } catch (error) {
      this.#fail(error);
      return;
    }
    const numLanes = Math.max(1, ...[...forksOf(compiled.root)].map((lanes) => lanes.length));
    for (const { lane, call: item } of callsOf(compiled.root)) {
      if (!item.variable) continue;
      let call = this.calls.get(item.key);
      if (!call) this.calls.set(item.key, (call = new Call(item.key, lane.path, lane.label)));
      const selected = item.kind === "select" ? item.step.name : null;
      this.#follow(call, this.#run.variable(item.variable), numLanes <= MAX_SPOKEN_LANES, selected);
      if (item.tokens) this.#readTokens(call, this.#run.variable(item.tokens));
    }
    // A continuation lacks the lanes that were left out; they stay on the stage as they are.
    this.root.value ??= compiled.root;
  }

  #session: Session | null = null;

  /** `selected`: the name of a select, whose choice alone is no sentence. */
  #follow(call: Call, variable: Variable, isSpoken: boolean, selected: string | null): void {
    call.variable.value = variable;
    call.status.value = "waiting";
    call.problem.value = null;
    const sentences = new SentenceReader();
    const say = (found: string[]): void => {
      for (const sentence of found) announce(call.label && call.path ? `${call.label}: ${sentence}` : sentence);
    };
    this.#unsubscribe.push(
      variable.onChange((_, added) => {
        if (call.status.peek() === "waiting" && added) call.status.value = "running";
        if (isSpoken && added && selected === null) say(sentences.push(added));
        if (added) this.#estimating ??= setTimeout(() => this.#estimate(), ESTIMATE_EVERY_MS);
        if (!variable.done) return;
        if (isSpoken) say(selected === null ? sentences.finish() : variable.text ? [`${selected} is ${variable.text}.`] : []);
        this.#ended(call, variable);
      }),
    );
  }

  #ended(call: Call, variable: Variable): void {
    if (call.status.peek() === "done" || call.status.peek() === "cancelled" || call.status.peek() === "failed") return;
    const { error } = variable;
    if (error) {
      const isCancelled = error.code === "cancelled" || this.#isCancelled(call.path) || this.status.peek() === "stopped";
      call.status.value = isCancelled ? "cancelled" : "failed";
      if (!isCancelled) call.problem.value = sentenceOf(rootCause(error));
    } else {
      call.status.value = "done";
      call.usage.value = variable.usage ?? null;
      call.finishReason.value = variable.finishReason ?? null;
      call.scores.value = variable.choices ?? null;
      if (variable.forced?.length) call.forced.value = utf16Spans(variable.text, variable.forced);
      this.#known.set(call.key, variable.text);
      // It was complete before the server read the cancel: the branch counts like the others.
      const isLate = (path: string): boolean => isWithin(call.path, path) && this.#isWhole(path);
      if ([...this.cancelled.peek()].some(isLate)) {
        this.cancelled.value = new Set([...this.cancelled.peek()].filter((path) => !isLate(path)));
      }
    }
    this.#estimate();
    this.#checkEnd();
  }

  #estimate(): void {
    clearTimeout(this.#estimating);
    this.#estimating = undefined;
    this.#numChanges.value++;
  }

  #readTokens(call: Call, variable: Variable): void {
    variable.then(
      (text) => (call.promptTokens.value = JSON.parse(text) as string[]),
      () => undefined, // the backend has no tokens, or the lane was cancelled
    );
  }

  #isCancelled(path: string): boolean {
    return [...this.cancelled.peek()].some((one) => isWithin(path, one));
  }

  /** Whether all texts of the branch and of those below it are complete. */
  #isWhole(path: string): boolean {
    return [...this.calls.values()].every((call) => !isWithin(call.path, path) || call.status.peek() === "done");
  }

  #checkEnd(): void {
    if (this.status.peek() !== "running") return;
    const calls = [...this.calls.values()];
    if (calls.some((call) => call.status.peek() === "waiting" || call.status.peek() === "running")) return;
    const missing = calls.filter(
      (call) => call.status.peek() !== "done" && !this.#isCancelled(call.path),
    );
    if (missing.length === 0) {
      this.status.value = "done";
      const { prompt, cached } = this.totals.peek();
      this.#finish(`Done. ${cached} of ${prompt} prompt tokens came from the cache.`);
    } else if (this.cancelled.peek().size && missing.every((call) => isFollowOfCancel(call)) && this.#session) {
      announce("The program goes on without the cancelled branch.");
      this.#submit(this.#session);
    } else {
      const failed = missing.find((call) => call.problem.peek()) ?? missing[0]!;
      this.status.value = "failed";
      this.problem.value = failed.problem.peek() ?? "The run was cancelled.";
      this.#finish(`The run failed. ${this.problem.peek()}`);
    }
  }

  #fail(error: unknown): void {
    this.status.value = "failed";
    this.problem.value = sentenceOf(error);
    this.#finish(`The run failed. ${this.problem.peek()}`);
  }

  #finish(sentence: string): void {
    this.duration.value = (this.duration.peek() ?? 0) + (performance.now() - this.#beganAt) / 1000;
    announce(sentence);
  }

  #release(): void {
    for (const unsubscribe of this.#unsubscribe) unsubscribe();
    this.#unsubscribe = [];
  }
}

function tokensOf(numChars: number): number {
  return Math.ceil(numChars / CHARS_PER_TOKEN);
}

export function isWithin(path: string, branch: string): boolean {
  return path === branch || path.startsWith(`${branch}.`);
}

/** The call failed because a text that it needs was cancelled. */
function isFollowOfCancel(call: Call): boolean {
  const error = call.variable.peek()?.error;
  return call.status.peek() === "cancelled" || (error !== undefined && rootCause(error).code === "cancelled");
}

function rootCause<E extends Error & { code: string }>(error: E): E {
  let found = error;
  while (found.cause instanceof Error && "code" in found.cause) found = found.cause as E;
  return found;
}

function laneAt(lane: Lane, path: string): Lane | null {
  if (lane.path === path) return lane;
  for (const lanes of forksOf(lane)) {
    for (const inner of lanes) {
      const found = laneAt(inner, path);
      if (found) return found;
    }
  }
  return null;
}

function* forksOf(lane: Lane): Generator<Lane[]> {
  for (const item of lane.items) if (item.kind === "fork") yield item.lanes;
}
