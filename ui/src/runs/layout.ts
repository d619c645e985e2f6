// The rows of the timeline and the time that it shows: fork tree on the left, time on the right.

import type { Call, Run, RunState, Span } from "./recording";
import { isModelCall, withForks } from "./recording";

/** Deeper levels are not indented further. */
export const MAX_GUIDES = 11;
/** A collapsed row shows the calls of all its forks, or beyond so many their sums. */
const MAX_CALLS = 24;

/** Calls as one bar. */
export interface CallSums {
  readonly calls: number;
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly readyS: number;
  readonly firstS: number;
  readonly endS: number;
}

/** A state's row. `guides`: for each level between the root and the state, of the nearest ones, whether a line goes on
 * to a later row. It looks for its calls when it is drawn: of 100,000 rows some 20 are visible. */
export class Row {
  #shown: { readonly calls: readonly Call[]; readonly sums: CallSums | null } | undefined;

  constructor(
    readonly state: RunState,
    readonly depth: number,
    readonly guides: readonly boolean[],
    readonly position: number,
    readonly siblings: number,
    readonly isOpen: boolean,
  ) {}

  get isLast(): boolean {
    return this.position === this.siblings;
  }

  get hasForks(): boolean {
    return this.state.forks.length > 0;
  }

  /** The calls of its state; if it is collapsed, of its forks too. Empty if there are `sums` instead. */
  get calls(): readonly Call[] {
    return this.#find().calls;
  }

  get sums(): CallSums | null {
    return this.#find().sums;
  }

  #find(): { readonly calls: readonly Call[]; readonly sums: CallSums | null } {
    return (this.#shown ??= this.isOpen
      ? { calls: this.state.calls.filter(isModelCall), sums: null }
      : callsBelow(this.state));
  }
}

/** The rows in the order of the fork tree, without those below collapsed states. */
export function rowsOf(runs: readonly Run[], collapsed: ReadonlySet<RunState>): Row[] {
  const rows: Row[] = [];
  const waiting: Row[] = [];
  const wait = (states: readonly RunState[], depth: number, guides: readonly boolean[]): void => {
    for (let i = states.length - 1; i >= 0; i--) {
      const state = states[i] as RunState;
      waiting.push(new Row(state, depth, guides, i + 1, states.length, !collapsed.has(state)));
    }
  };
  wait(runs.map((run) => run.root), 0, []);
  for (let row = waiting.pop(); row !== undefined; row = waiting.pop()) {
    rows.push(row);
    if (!row.isOpen || !row.hasForks) continue;
    const guides = row.depth === 0 ? [] : [...row.guides, !row.isLast].slice(-MAX_GUIDES);
    wait(row.state.forks, row.depth + 1, guides);
  }
  return rows;
}

function callsBelow(state: RunState): { calls: readonly Call[]; sums: CallSums | null } {
  const first: Call[] = [];
  let [calls, promptTokens, cachedTokens, readyS, endS] = [0, 0, 0, Infinity, 0];
  for (const one of withForks(state)) {
    for (const call of one.calls) {
      if (!isModelCall(call)) continue;
      if (++calls <= MAX_CALLS) first.push(call);
      promptTokens += call.usage?.prompt_tokens ?? 0;
      cachedTokens += call.usage?.cached_tokens ?? 0;
      readyS = Math.min(readyS, call.readyS);
      endS = Math.max(endS, call.endS ?? one.endS);
    }
  }
  if (calls <= MAX_CALLS) return { calls: first, sums: null };
  return { calls: [], sums: { calls, promptTokens, cachedTokens, readyS, firstS: readyS, endS } };
}

const MAX_ROWS_AT_FIRST = 200;

/** What is collapsed at first, so that there are no more rows than one can look through: the runs, or of a single
 * run what lies below as many levels as fit. */
export function collapsedAtFirst(runs: readonly Run[]): ReadonlySet<RunState> {
  let level = runs.map((run) => run.root);
  const numStates = runs.reduce((sum, run) => sum + run.states.length, 0);
  if (runs.length > 1 && numStates > MAX_ROWS_AT_FIRST) return new Set(level);
  for (let numRows = level.length; level.length > 0; ) {
    numRows += level.reduce((sum, state) => sum + state.forks.length, 0);
    if (numRows > MAX_ROWS_AT_FIRST) break;
    level = level.flatMap((state) => state.forks);
  }
  return new Set(level.filter((state) => state.forks.length > 0));
}

/** The time of a state and of all its forks, with a little more on both sides. */
export function spanBelow(state: RunState, whole: Span): Span {
  const beginS = state.startS;
  let toS = 0;
  for (const one of withForks(state)) toS = Math.max(toS, one.endS);
  const length = Math.min(Math.max(1.04 * (toS - beginS), 1e-3), whole.toS - whole.beginS);
  return movedSpan({ beginS: beginS - 0.02 * (toS - beginS), toS: 0 }, whole, length);
}

/** Zooms by `factor` around `atS`, within `whole`. */
export function zoomedSpan(shown: Span, whole: Span, factor: number, atS: number): Span {
  const [length, most] = [shown.toS - shown.beginS, whole.toS - whole.beginS];
  const wanted = Math.min(Math.max(length / factor, most / 10_000, 1e-4), most);
  return movedSpan({ beginS: atS - ((atS - shown.beginS) * wanted) / length, toS: 0 }, whole, wanted);
}

/** Moves the span by `byS`, within `whole`. */
export function pannedSpan(shown: Span, whole: Span, byS: number): Span {
  return movedSpan({ beginS: shown.beginS + byS, toS: 0 }, whole, shown.toS - shown.beginS);
}

function movedSpan(start: Span, whole: Span, length: number): Span {
  const beginS = Math.max(whole.beginS, Math.min(start.beginS, whole.toS - length));
  return { beginS, toS: beginS + length };
}

/** A span of the same length that shows the call's beginning, the same one if it already does. */
export function revealedSpan(shown: Span, whole: Span, call: Call): Span {
  const { beginS, toS } = shown;
  const endS = call.endS ?? call.readyS;
  if (call.readyS >= beginS && endS <= toS) return shown;
  const length = toS - beginS;
  const isShort = endS - call.readyS < length;
  return movedSpan(
    { beginS: isShort ? (call.readyS + endS - length) / 2 : call.readyS, toS: 0 },
    whole,
    length,
  );
}

/** A call's bar in shares of the shown time, 0 to 1: from when it could begin to its end. `first`: the share of the
 * bar's own width at which the first text came. Null if nothing of it is shown. */
export interface Bar {
  readonly left: number;
  readonly width: number;
  readonly first: number;
  readonly isCutLeft: boolean;
  readonly isCutRight: boolean;
}

export function barOf(
  call: Pick<Call, "readyS" | "firstS" | "endS">, shown: Span, lastS: number): Bar | null {
  const length = shown.toS - shown.beginS;
  const endS = call.endS ?? Math.max(call.readyS, lastS);
  if (endS < shown.beginS || call.readyS > shown.toS) return null;
  const beginS = Math.max(call.readyS, shown.beginS);
  const toS = Math.min(endS, shown.toS);
  const firstS = Math.min(Math.max(call.firstS ?? endS, beginS), toS);
  return {
    left: (beginS - shown.beginS) / length,
    width: (toS - beginS) / length,
    first: toS > beginS ? (firstS - beginS) / (toS - beginS) : 0,
    isCutLeft: call.readyS < shown.beginS,
    isCutRight: endS > shown.toS,
  };
}

/** The rows that a scrolled window shows, with some before and after. */
export function visible(
  numRows: number,
  rowHeight: number,
  scrollTop: number,
  height: number,
): [number, number] {
  const from = Math.max(0, Math.floor(scrollTop / rowHeight) - 6);
  return [Math.min(from, numRows), Math.min(numRows, Math.ceil((scrollTop + height) / rowHeight) + 6)];
}

/** Of a longer path the end is shown. */
const MAX_PATH = 24;

/** A state's name as `agentflow replay` writes it: `run 0` for a root, else its path in the fork tree. */
export function nameOf(state: RunState): string {
  if (state.parent === null) {
    const { index, program } = state.run;
    return program === "" ? `run ${index}` : `run ${index}: ${isolated(program)}`;
  }
  const path: (number | string)[] = [];
  for (let at = state; at.parent !== null; at = at.parent) {
    if (path.length === MAX_PATH) {
      path[MAX_PATH - 1] = "…";
      break;
    }
    path.push(at.index);
  }
  return `(${path.reverse().join(", ")})`;
}

/** Text from outside, in a form whose direction does not reach the text around it. */
export function isolated(text: string): string {
  return /[\u0590-\uffff]/.test(text) ? `\u2068${text}\u2069` : text;
}

export type Outcome = "done" | "failed" | "cancelled" | "open";

/** How a call ended. `open`: the recording has no end of it. */
export function outcomeOf(call: Call): Outcome {
  if (call.error !== null) return call.error.origin === "cancelled" ? "cancelled" : "failed";
  if (call.endS !== null) return "done";
  return call.state.isCancelled ? "cancelled" : "open";
}

/** How a state ended, if not as expected. */
export function endOf({ failure, error, isCancelled }: RunState): "failed" | "cancelled" | "" {
  if (failure !== null || (error !== null && error.origin !== "cancelled")) return "failed";
  return isCancelled || error !== null ? "cancelled" : "";
}
