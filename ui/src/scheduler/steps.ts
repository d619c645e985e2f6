// The engine's forward passes, as bars of tokens.

import { count } from "../charts/numbers";

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

/** Steps without those that were seen before. A smaller number than before: the engine began anew. */
export function newSteps(steps: readonly Step[], last: Step | undefined): readonly Step[] {
  if (last === undefined || steps.length === 0) return steps;
  const [newest] = steps[steps.length - 1] as Step;
  return newest < last[0] ? steps : steps.filter(([number]) => number > last[0]);
}

/** A step as a sentence. */
export function describeStep([number, prefill, decode, running, waiting, used, ms]: Step): string {
  return (
    `Step ${count(number)}: ${prefill} prefill and ${decode} decode tokens in ${ms.toFixed(1)} ms; ` +
    `${running} running, ${waiting} waiting, ${count(used)} tokens of the KV pool in use.`
  );
}
