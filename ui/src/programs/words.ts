// Nodes and states of a live graph in words.
import type { LiveGraph, LiveMedium, LiveNode, LiveState } from "agentflow-client";
import { compact, count, counted } from "../charts/numbers";
import { startOf } from "../text/shorten";

const KINDS: Readonly<Record<string, string>> = {
  gen: "gen",
  reply: "reply",
  select: "select",
  decide: "decide",
  embed: "embed",
  set: "text",
  read: "content",
  done: "end",
  expect: "value from the client",
  fork: "fork",
  gather: "end of a submitted graph",
};

const MISSES: Readonly<Record<string, string>> = {
  first_seen: "seen for the first time",
  evicted: "evicted",
  salt: "cached under another salt",
  adapter: "cached for another adapter",
  tools_changed: "the tools changed",
  system_changed: "the system prompt changed",
  rerendered: "the chat template rewrote it",
  several: "several reasons",
};

/** `1,234 tokens: evicted`; "" without a reason. */
export function missOf(reason: string | undefined, numTokens: number | undefined): string {
  return reason ? `${counted(numTokens ?? 0, "token")}: ${MISSES[reason] ?? reason}` : "";
}

const MAX_NAME_CHARS = 200;
/** In the facts about one node, which may need 1,000 others. */
const MAX_NAMES = 20;

export function nameOf(node: LiveNode): string {
  return startOf(node.name ?? "", MAX_NAME_CHARS) || kindOf(node);
}

function kindOf(node: LiveNode): string {
  return KINDS[node.kind] ?? node.kind;
}

/** What stands below the name of a node. */
export function lineOf(node: LiveNode): string {
  const parts = [statusOf(node)];
  if (isUnfinished(node)) {
    parts.push(node.objective ?? "latency");
    if (node.awaited) parts.push(node.awaited === "stream" ? "streamed" : "awaited");
  }
  return parts.join(" · ");
}

/** Where a request runs, and which images it reads: the third line of a node, or "". */
export function placeOf(node: LiveNode): string {
  const parts: string[] = [];
  if (node.replica != null) parts.push(`replica ${node.replica}`);
  if (node.num_media) parts.push(mediaOf(node));
  return parts.join(" · ");
}

export function statusOf(node: LiveNode): string {
  return node.status ?? "waiting";
}

function isUnfinished(node: LiveNode): boolean {
  return statusOf(node) === "waiting" || statusOf(node) === "running";
}

/** `3 images`, `1 video`. */
export function mediaOf(node: LiveNode): string {
  const kinds = new Set((node.media ?? []).map(({ kind }) => kind ?? "image"));
  const noun = kinds.size > 1 ? "image or video" : kinds.has("video") ? "video" : "image";
  return counted(node.num_media ?? 0, noun, kinds.size > 1 ? "images and videos" : `${noun}s`);
}

/** `image/png, 12.3 kB`, or the address of one that the server fetches. */
export function mediumLine({ source, kind, media_type: type, num_bytes: size }: LiveMedium): string {
  const parts: string[] = [type || (kind ?? "image")];
  if (size) parts.push(bytes(size));
  if (!source.startsWith("sha256:")) parts.push(source);
  return parts.join(", ");
}

function bytes(size: number): string {
  return size < 1000 ? counted(size, "byte") : `${compact(size / 1000)} kB`;
}

/** The facts about a node, as pairs of a name and a value. */
export function factsOf(node: LiveNode, graph: LiveGraph): [name: string, value: string][] {
  const nodes = graph.nodes ?? [];
  const state = graph.states?.find(({ id }) => id === node.state);
  const facts: [string, string][] = [
    ["Kind", kindOf(node)],
    ["State", state ? stateName(state) : `${node.state}, closed`],
    ["Status", statusOf(node)],
  ];
  if (isUnfinished(node)) facts.push(["Objective", node.objective ?? "latency"]);
  if (node.replica != null) facts.push(["Replica", String(node.replica)]);
  if (node.group) facts.push(["Task group", String(node.group)]);
  if (node.awaited) facts.push(["Awaited", node.awaited === "stream" ? "as it grows" : "as a whole"]);
  if (node.num_media) {
    const shown = (node.media ?? []).map(mediumLine);
    const more = node.num_media - shown.length;
    facts.push(["Images and videos", [...shown, ...(more > 0 ? [`${count(more)} more`] : [])].join("; ")]);
  }
  facts.push(["Needs", namesOf(nodes.filter(({ id }) => node.needs?.includes(id)))]);
  facts.push(["Needed by", namesOf(nodes.filter(({ needs }) => needs?.includes(node.id)))]);
  return facts;
}

function namesOf(nodes: readonly LiveNode[]): string {
  const shown = nodes.slice(0, MAX_NAMES).map(nameOf).join(", ");
  const more = nodes.length - MAX_NAMES;
  return more > 0 ? `${shown} and ${count(more)} more` : shown || "nothing";
}

/** `3 of judge`. */
export function stateName(state: LiveState): string {
  return state.label ? `${state.id} of ${state.label}` : String(state.id);
}

/** What the next request of a state waits for. */
export function nextOf(state: LiveState): string {
  if (state.has_ended) return "none: it has failed or was cancelled";
  const steps = state.steps === undefined ? 0 : state.steps;
  if (steps === null) return "waits for its client";
  return steps === 0 ? "runs, or may run" : `after ${counted(steps, "other request")}`;
}

const MAX_LABELS = 3;

/** The names of the programs of a session. */
export function titleOf(graph: LiveGraph): string {
  const labels = [...new Set((graph.states ?? []).map(({ label }) => label ?? "").filter(Boolean))];
  const more = labels.length - MAX_LABELS;
  const shown = labels.slice(0, MAX_LABELS).join(", ");
  return labels.length === 0 ? "no program name" : more > 0 ? `${shown} and ${more} more` : shown;
}

/** `2 running, 3 waiting`. */
export function countsOf(graph: LiveGraph): string {
  const nodes = graph.nodes ?? [];
  return ["running", "waiting", "failed"]
    .map((status) => [nodes.filter((node) => statusOf(node) === status).length, status] as const)
    .filter(([num]) => num > 0)
    .map(([num, status]) => `${num} ${status}`)
    .join(", ");
}
