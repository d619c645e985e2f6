// What the cache saved over time, from the counters of `watched.stats`.

import type { Stats } from "agentflow-client";
import type { Ring } from "../charts/ring";

/** The engine's counters at a moment: all prompt tokens, and those of them that were cached. */
export interface Sample {
  readonly model: string;
  readonly atS: number;
  readonly promptTokens: number;
  readonly cachedTokens: number;
}

export interface Savings {
  /** For each sample the hit rate of the seconds before it; null without prompts. */
  readonly recent: readonly (number | null)[];
  /** Since the server started. */
  readonly overall: readonly (number | null)[];
  /** Prompt tokens that were not computed since the server started. */
  readonly saved: readonly number[];
}

/** Adds the counters at `atS`. Samples of another model, which the page watched before, are dropped. */
export function addSample(samples: Ring<Sample>, stats: Stats, atS: number): void {
  const { model, prompt_tokens: promptTokens, cached_tokens: cachedTokens } = stats;
  if (samples.last?.model !== model) samples.clear();
  samples.push({ model, atS, promptTokens, cachedTokens });
}

/** `windowS`: how far the recent hit rate looks back. */
export function savings(samples: readonly Sample[], windowS = 10): Savings {
  let first = 0;
  const recent = samples.map((sample, i) => {
    if (i > 0 && sample.promptTokens < (samples[i - 1] as Sample).promptTokens) first = i; // a new engine
    while (sample.atS - (samples[first] as Sample).atS > windowS) first += 1;
    const before = samples[first] as Sample;
    const grown = sample.promptTokens - before.promptTokens;
    return grown > 0 ? (sample.cachedTokens - before.cachedTokens) / grown : null;
  });
  return {
    recent,
    overall: samples.map((one) => (one.promptTokens > 0 ? one.cachedTokens / one.promptTokens : null)),
    saved: samples.map((one) => one.cachedTokens),
  };
}
