// The rows of the timeline and the time that it shows: fork tree on the left, time on the right.

import type { Call, Run, RunState } from "./recording";
import { isModelCall, withForks } from "./recording";

/** A state's row. `guides`: for each level between the root and the state, of the nearest ones, whether a line goes on
 * to a later row. */
export interface Row {
  readonly state: RunState;
  readonly depth: number;
  readonly guides: readonly boolean[];
  readonly isLast: boolean;
  readonly hasForks: boolean;
  readonly isOpen: boolean;
  readonly calls: readonly Call[];
  readonly position: number;
  readonly siblings: number;
}

/** The rows in the order of the fork tree, without those below collapsed states. */
export function rowsOf(runs: readonly Run[], collapsed: ReadonlySet<RunState>): Row[] {
  const rows: Row[] = [];
  interface Waiting {
    state: RunState;
    depth: number;
    guides: readonly boolean[];
    position: number;
    siblings: number;
  }
  const waiting: Waiting[] = runs
    .map((run, i) => ({ state: run.root, depth: 0, guides: [], position: i + 1, siblings: runs.length }))
    .reverse();
  while (waiting.length > 0) {
    const { state, depth, guides, position, siblings } = waiting.pop() as Waiting;
    const isLast = position === siblings;
    const isOpen = !collapsed.has(state);
    const hasForks = state.forks.length > 0;
    rows.push(new TreeRow(state, depth, guides, isLast, hasForks, isOpen, position, siblings));
    if (!isOpen) continue;
    const below = depth === 0 ? [] : [...guides, !isLast].slice(-MAX_GUIDES);
    for (let i = state.forks.length - 1; i >= 0; i--) {
      const fork = state.forks[i] as RunState;
      waiting.push({
        state: fork,
        depth: depth + 1,
        guides: below,
        position: i + 1,
        siblings: state.forks.length,
      });
    }
  }
  return rows;
}

/** Looks for its calls when it is drawn: a long recording has 100,000 rows, of which some 20 are visible. */
class TreeRow implements Row {
  #calls: readonly Call[] | undefined;

  constructor(
    readonly state: RunState,
    readonly depth: number,
    readonly guides: readonly boolean[],
    readonly isLast: boolean,
    readonly hasForks: boolean,
    readonly isOpen: boolean,
    readonly position: number,
    readonly siblings: number,
  ) {}

  get calls(): readonly Call[] {
    return (this.#calls ??= this.isOpen ? this.state.calls.filter(isModelCall) : callsBelow(this.state));
  }
}

/** Deeper levels are not indented further. */
export const MAX_GUIDES = 11;
/** A collapsed row shows the calls of all its forks, so far as there is room for them. */
const MAX_CALLS = 200;

function callsBelow(state: RunState): Call[] {
  const calls: Call[] = [];
  for (const one of withForks(state)) {
    calls.push(...one.calls.filter(isModelCall));
    if (calls.length >= MAX_CALLS) break;
  }
  return calls.slice(0, MAX_CALLS);
}

/** The runs that are collapsed at first: all, if their states would be too many rows to look through. */
export function collapsedAtFirst(runs: readonly Run[]): ReadonlySet<RunState> {
  const numStates = runs.reduce((sum, run) => sum + run.states.length, 0);
  return new Set(runs.length > 1 && numStates > 200 ? runs.map((run) => run.root) : []);
}

/** A span of time in seconds. */
export interface Span {
  readonly beginS: number;
  readonly toS: number;
}

/** From the first op to the last event of the runs. */
export function spanOf(runs: readonly Run[]): Span {
  let [beginS, toS] = [Infinity, 0];
  for (const run of runs) {
    for (const state of run.states) {
      beginS = Math.min(beginS, state.startS);
      toS = Math.max(toS, state.endS);
    }
  }
  if (!Number.isFinite(beginS)) return { beginS: 0, toS: 1 };
  return { beginS, toS: Math.max(toS, beginS + 1e-3) };
}

/** The time of a state and of all its forks, with a little more on both sides. */
export function spanBelow(state: RunState, whole: Span): Span {
  const states = withForks(state);
  const beginS = Math.min(...states.map((one) => one.startS));
  const toS = Math.max(...states.map((one) => one.endS));
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

export function barOf(call: Call, shown: Span, lastS: number): Bar | null {
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

/** The indices of the forks that lead to the state; empty for a root. */
function pathOf(state: RunState): number[] {
  const path: number[] = [];
  for (let at = state; at.parent !== null; at = at.parent) path.push(at.index);
  return path.reverse();
}

/** A state's name as `agentflow replay` writes it: `run 0` for a root, else its path in the fork tree. */
export function nameOf(state: RunState): string {
  if (state.parent !== null) return `(${pathOf(state).join(", ")})`;
  return state.run.program === ""
    ? `run ${state.run.index}`
    : `run ${state.run.index}: ${isolated(state.run.program)}`;
}

/** Text from outside, in a form whose direction does not reach the text around it. */
export function isolated(text: string): string {
  return /[\u0590-\uffff]/.test(text) ? `\u2068${text}\u2069` : text;
}

export type Outcome = "done" | "failed" | "cancelled" | "open";

/** How a call ended. `open`: the recording has no end of it. */
export function outcomeOf(call: Call): Outcome {
  if (call.error !== null) return call.error.code === "cancelled" ? "cancelled" : "failed";
  if (call.endS !== null) return "done";
  return call.state.isCancelled ? "cancelled" : "open";
}
