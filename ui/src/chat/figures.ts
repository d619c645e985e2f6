// The tokens and times of a reply, in words.
import type { Usage } from "agentflow-client";
import { count, counted, duration } from "../charts/numbers";

export interface Figures {
  readonly numPrompt: number;
  readonly numCached: number;
  readonly numOutput: number;
  readonly numReasoning: number;
  /** From the request to the first text or reasoning that arrived, and to the end, in seconds. */
  readonly firstS: number;
  readonly totalS: number;
}

export function figuresOf(usage: Usage, firstS: number, totalS: number): Figures {
  return {
    numPrompt: usage.prompt_tokens,
    numCached: usage.cached_tokens ?? 0,
    numOutput: usage.output_tokens,
    numReasoning: usage.reasoning_tokens ?? 0,
    firstS,
    totalS,
  };
}

const MIN_S = 0.05;

/** `120 tokens · 45.2 tokens/s · first after 310 ms · 80 of 1,234 prompt tokens cached`. */
export function lineOf({ numPrompt, numCached, numOutput, firstS, totalS }: Figures): string {
  const parts = [counted(numOutput, "token")];
  // A reply that came in one piece, or in two frames of the screen, has no speed.
  if (numOutput > 1 && totalS - firstS > MIN_S) parts.push(`${((numOutput - 1) / (totalS - firstS)).toFixed(1)} tokens/s`);
  if (numOutput > 0) parts.push(`first after ${duration(firstS)}`);
  if (numPrompt > 0) parts.push(`${count(numCached)} of ${counted(numPrompt, "prompt token")} cached`);
  return parts.join(" · ");
}
