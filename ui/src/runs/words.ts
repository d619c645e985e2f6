// Calls in words.

import { ReplySoFar } from "agentflow-client";
import { counted, duration, percent } from "../charts/numbers";
import { missOf } from "../programs/words";
import { startOf } from "../text/shorten";
import type { Call, RunState, Usage } from "./recording";
import { isolated, nameOf, outcomeOf, type Outcome } from "./layout";

const OUTCOMES: Readonly<Record<Outcome, string>> = {
  done: "done",
  failed: "failed",
  cancelled: "cancelled",
  open: "without an end",
};

const FINISHES: Readonly<Record<string, string>> = {
  eos: "ended by the model (eos)",
  stop: "ended at a stop string (stop)",
  length: "reached its maximum of tokens (length)",
};

/** The share of prompt tokens that were cached, 0 to 1. */
export function cachedShare(usage: Usage | null): number {
  return usage !== null && usage.prompt_tokens > 0 ? usage.cached_tokens / usage.prompt_tokens : 0;
}

/** What stands in a bar: `thought · 28 tokens · 98% cached`, and at its end what is unusual. */
export function labelOf(call: Call): string {
  const parts = [isolated(call.name)];
  const { usage } = call;
  if (usage !== null) {
    if (call.kind === "gen") parts.push(counted(usage.output_tokens, "token"));
    if (usage.prompt_tokens > 0) parts.push(`${percent(cachedShare(usage))} cached`);
  }
  const outcome = outcomeOf(call);
  if (outcome !== "done") parts.push(OUTCOMES[outcome]);
  else if (call.finishReason === "length") parts.push("cut");
  return parts.join(" · ");
}

/** A call for screen readers; it begins with the label, which is what the bar shows. */
export function describeCall(call: Call): string {
  const { usage, endS } = call;
  const prompt = usage === null ? "" : `, prompt of ${counted(usage.prompt_tokens, "token")}`;
  return `${labelOf(call)}, ${call.kind}${prompt}, from ${duration(call.readyS)}${endS === null ? "" : ` to ${duration(endS)}`}`;
}

/** What a call wrote: of a reply its prose, and a line for each tool call. */
export function textOf(call: Call): string {
  if (!call.isReply) return call.text;
  try {
    const found = new ReplySoFar();
    found.push(call.text);
    const { text, toolCalls } = found.now();
    return [text, ...toolCalls.map((tool) => `${tool.name}(${tool.arguments})`)].filter(Boolean).join("\n");
  } catch {
    return call.text; // malformed: shown as it is
  }
}

/** The exception of a program that failed; else the text that distinguishes a state from its siblings: the
 * first one that was appended, or, if that is very short, the first one that was generated. */
export function summaryOf(state: RunState): string {
  if (state.failure !== null) return state.failure;
  const own = state.firstText;
  const [first] = state.calls;
  if (own.length > 3 || first === undefined) return own;
  return startOf(textOf(first), 200).replace(/\s+/g, " ").trim() || own;
}

function finishOf({ finishReason }: Call): string {
  return finishReason === null ? "done" : (FINISHES[finishReason] ?? finishReason);
}

/** The facts about a call, as pairs of a name and a value. */
export function factsOf(call: Call, lastS: number): [name: string, value: string][] {
  const { usage, firstS, endS } = call;
  const outcome = outcomeOf(call);
  const facts: [string, string][] = [
    ["State", nameOf(call.state)],
    ["Outcome", outcome === "done" ? finishOf(call) : OUTCOMES[outcome]],
  ];
  if (usage !== null) {
    const share = usage.prompt_tokens > 0 ? ` (${percent(cachedShare(usage))})` : "";
    facts.push(["Prompt", counted(usage.prompt_tokens, "token")]);
    facts.push(["Cached", `${counted(usage.cached_tokens, "token")}${share}`]);
    const missed = missOf(usage.miss_reason, usage.prompt_tokens - usage.cached_tokens);
    if (missed) facts.push(["Not cached", missed]);
    if (call.kind === "gen") facts.push(["Output", counted(usage.output_tokens, "token")]);
    if (usage.forced_tokens) facts.push(["Forced", counted(usage.forced_tokens, "token")]);
  }
  facts.push(["Sent at", duration(call.sentS)], ["Could begin at", duration(call.readyS)]);
  if (firstS !== null) facts.push(["First text after", duration(firstS - call.readyS)]);
  if (endS !== null) facts.push(["Took", duration(endS - call.readyS)]);
  else facts.push(["Ran for at least", duration(Math.max(0, lastS - call.readyS))]);
  if (usage !== null && firstS !== null && endS !== null && endS > firstS && usage.output_tokens > 1) {
    facts.push(["Per token after the first", duration((endS - firstS) / (usage.output_tokens - 1))]);
  }
  return facts;
}
