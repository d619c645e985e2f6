// The engine's forward passes, as bars of tokens.

import { count } from "../charts/numbers";
import { Ring } from "../charts/ring";

/** A step as `watched.steps` has it. */
export type Step = readonly [
  number: number,
  prefillTokens: number,
  decodeTokens: number,
  running: number,
  waiting: number,
  usedSlots: number,
  durationMs: number,
];

export interface Bars {
  /** Of all decode parts, and of all prefill parts above them. */
  readonly decode: string;
  readonly prefill: string;
}

/** The paths of the bars, the newest at the right edge. `perToken`: pixels. */
export function barPaths(
  steps: readonly Step[],
  right: number,
  base: number,
  pitch: number,
  perToken: number,
): Bars {
  let [decode, prefill] = ["", ""];
  const width = Math.max(1, pitch - 1);
  steps.forEach(([, prefillTokens, decodeTokens], i) => {
    const x = right - (steps.length - i) * pitch;
    const lower = decodeTokens * perToken;
    const upper = prefillTokens * perToken;
    if (lower > 0) decode += bar(x, base - lower, width, lower);
    if (upper > 0) prefill += bar(x, base - lower - upper, width, upper);
  });
  return { decode, prefill };
}

function bar(x: number, y: number, width: number, height: number): string {
  return `M${x.toFixed(1)} ${y.toFixed(1)}h${width}v${height.toFixed(1)}h${-width}z`;
}

/** The newest steps of one model. */
export class StepLog {
  private readonly ring: Ring<Step>;
  private model: string | null = null;

  constructor(capacity: number) {
    this.ring = new Ring(capacity);
  }

  /** Adds the steps that were not seen before. Those of another model, which the page watched before, are dropped.
   *  A smaller number than before: the engine was started again. */
  add(steps: readonly Step[], model: string | undefined): void {
    if (model !== undefined && model !== this.model) {
      this.ring.clear();
      this.model = model;
    }
    const last = this.ring.last?.[0] ?? -1;
    const newest = steps[steps.length - 1]?.[0] ?? last;
    this.ring.push(...(newest < last ? steps : steps.filter(([number]) => number > last)));
  }

  /** A copy, oldest first. */
  toArray(): Step[] {
    return this.ring.toArray();
  }
}

/** A step as a sentence. */
export function describeStep([number, prefill, decode, running, waiting, used, ms]: Step): string {
  return (
    `Step ${count(number)}: ${prefill} prefill and ${decode} decode tokens in ${ms.toFixed(1)} ms; ` +
    `${running} running, ${waiting} waiting, ${count(used)} tokens of the KV pool in use.`
  );
}
