// Nodes of the prefix tree in words.

import { counted, duration } from "../charts/numbers";
import { stateOf, type NodeState, type PrefixNode } from "./prefixes";

export const STATE_WORDS: Readonly<Record<NodeState, string>> = {
  in_use: "in use",
  hit: "just hit",
  cached: "cached",
  evicted: "just evicted",
};

/** `42 tokens, in use by 2 requests, 3 continuations`. */
export function describeNode(node: PrefixNode, nowS: number): string {
  const state = stateOf(node, nowS);
  const parts = [counted(node.numTokens, "token")];
  if (node.numGenerated > 0) parts.push(`${node.numGenerated} of them generated`);
  if (state === "in_use") parts.push(`in use by ${counted(node.locks, "request")}`);
  else parts.push(STATE_WORDS[state]);
  if (node.children.length > 0) parts.push(counted(node.children.length, "continuation"));
  return parts.join(", ");
}

/** The facts about a node, as pairs of a name and a value. */
export function factsOf(node: PrefixNode, before: number, nowS: number): [name: string, value: string][] {
  const state = stateOf(node, nowS);
  const facts: [string, string][] = [
    ["Tokens", `${counted(node.numTokens, "token")}, ${node.numGenerated} generated`],
    ["Position", `after ${counted(before, "token")}`],
    [
      "State",
      state === "in_use" ? `in use by ${counted(node.locks, "running request")}` : STATE_WORDS[state],
    ],
    ["Continuations", String(node.children.length)],
    ["Open states here", String(node.keeps)],
    ["Last used", node.goneS === null ? `${duration(Math.max(0, nowS - node.usedS))} ago` : "evicted"],
  ];
  if (node.tenant !== "") facts.push(["Tenant", node.tenant]);
  return facts;
}
