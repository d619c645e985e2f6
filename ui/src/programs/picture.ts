// The drawing of a live graph: layers from left to right, in which each node stands behind what it needs.
import type { LiveGraph, LiveNode } from "agentflow-client";
import { placeOf } from "./words";

export const NODE_WIDTH = 212;
export const NODE_HEIGHT = 46;
const PLACE_HEIGHT = 15;
const GAP_X = 56;
const GAP_Y = 12;
const GROUP_PADDING = 7;
const GROUP_HEAD = 20;
const MARGIN = 12;

export interface PlacedNode {
  readonly node: LiveNode;
  readonly layer: number;
  readonly x: number;
  readonly y: number;
}

/** The box around the requests of one task group in one layer. */
export interface GroupBox {
  readonly group: number;
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

export interface Picture {
  /** Layer by layer, each from top to bottom. */
  readonly nodes: readonly PlacedNode[];
  readonly edges: readonly (readonly [from: PlacedNode, to: PlacedNode])[];
  readonly groups: readonly GroupBox[];
  /** Of each node: greater if one of them has a third line. */
  readonly nodeHeight: number;
  readonly width: number;
  readonly height: number;
  /** Nodes that are not drawn. */
  readonly numLeftOut: number;
}

const RANKS: Readonly<Record<string, number>> = { failed: 0, running: 0, waiting: 1, done: 2 };

/** The graph in at most `most` nodes: first those that run or have failed, then those that wait. */
export function pictureOf(graph: LiveGraph, most: number): Picture {
  const all = graph.nodes ?? [];
  const shown = [...all]
    .sort((a, b) => rankOf(a) - rankOf(b) || a.id - b.id)
    .slice(0, most)
    .sort((a, b) => a.id - b.id);
  const nodeHeight = NODE_HEIGHT + (shown.some((node) => placeOf(node) !== "") ? PLACE_HEIGHT : 0);
  const direct = directNeeds(shown);
  const placed = new Map<number, PlacedNode>();
  const groups: GroupBox[] = [];
  let x = MARGIN + GROUP_PADDING;
  let height = 0;
  layersOf(shown).forEach((layer, number) => {
    let y = MARGIN;
    for (const { group, members, at } of stacksOf(layer, direct, placed)) {
      if (group !== 0) y += GROUP_HEAD;
      const top = (y = Math.max(y, at - ((members.length - 1) * (nodeHeight + GAP_Y)) / 2));
      for (const node of members) {
        placed.set(node.id, { node, layer: number, x, y });
        y += nodeHeight + GAP_Y;
      }
      if (group === 0) continue;
      groups.push({
        group,
        x: x - GROUP_PADDING,
        y: top - GROUP_PADDING,
        width: NODE_WIDTH + 2 * GROUP_PADDING,
        height: y - GAP_Y - top + 2 * GROUP_PADDING,
      });
      y += GROUP_PADDING;
    }
    height = Math.max(height, y);
    x += NODE_WIDTH + GAP_X;
  });
  const nodes = [...placed.values()];
  return {
    nodes,
    edges: nodes.flatMap((to) => direct.get(to.node.id)!.map((id) => [placed.get(id)!, to] as const)),
    groups,
    nodeHeight,
    width: x - GAP_X + MARGIN + GROUP_PADDING,
    height: height - GAP_Y + MARGIN,
    numLeftOut: all.length - shown.length + (graph.num_nodes_left_out ?? 0),
  };
}

function rankOf(node: LiveNode): number {
  return RANKS[node.status ?? "waiting"] ?? 1;
}

function needsOf(node: LiveNode): readonly number[] {
  return node.needs ?? [];
}

/** Of each node, the nodes that it needs, without those that another one of them needs. */
function directNeeds(nodes: readonly LiveNode[]): Map<number, number[]> {
  const before = new Map<number, Set<number>>(); // all that a node needs, also by way of others
  const direct = new Map<number, number[]>();
  for (const node of nodes) {
    const needs = needsOf(node).filter((id) => before.has(id));
    const byWay = new Set(needs.flatMap((id) => [...before.get(id)!]));
    direct.set(node.id, needs.filter((id) => !byWay.has(id)));
    before.set(node.id, new Set([...byWay, ...needs]));
  }
  return direct;
}

/** The nodes by the length of the longest way to them. Each one comes after the nodes that it needs. */
function layersOf(nodes: readonly LiveNode[]): LiveNode[][] {
  const layerOf = new Map<number, number>();
  const layers: LiveNode[][] = [];
  for (const node of nodes) {
    const layer = Math.max(0, ...needsOf(node).map((id) => (layerOf.get(id) ?? -1) + 1));
    layerOf.set(node.id, layer);
    (layers[layer] ??= []).push(node);
  }
  return layers;
}

interface Stack {
  readonly group: number;
  readonly members: readonly LiveNode[];
  /** The middle of what they need. */
  readonly at: number;
}

/** A layer from top to bottom: the members of a task group together, and each node near what it needs. */
function stacksOf(
  layer: readonly LiveNode[],
  direct: ReadonlyMap<number, readonly number[]>,
  placed: ReadonlyMap<number, PlacedNode>,
): Stack[] {
  const middleOf = new Map(layer.map(({ id }) => [id, middle(direct.get(id)!.map((need) => placed.get(need)!.y))]));
  const byGroup = new Map<string, LiveNode[]>();
  for (const node of layer) {
    const key = node.group ? `group ${node.group}` : `node ${node.id}`;
    byGroup.set(key, [...(byGroup.get(key) ?? []), node]);
  }
  const at = (node: LiveNode): number => middleOf.get(node.id)!;
  return [...byGroup.values()]
    .map((members) => {
      const sorted = [...members].sort((a, b) => at(a) - at(b) || a.id - b.id);
      return { group: sorted[0]!.group ?? 0, members: sorted, at: middle(sorted.map(at)) };
    })
    .sort((a, b) => a.at - b.at || a.members[0]!.id - b.members[0]!.id);
}

function middle(values: readonly number[]): number {
  return values.length === 0 ? 0 : values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** The node to which a key moves the focus; null if the key does something else. */
export function neighbour(picture: Picture, at: PlacedNode, key: string): PlacedNode | null {
  const { nodes, edges } = picture;
  const index = nodes.indexOf(at);
  const inLayer = (one: PlacedNode | undefined): PlacedNode => (one?.layer === at.layer ? one : at);
  switch (key) {
    case "ArrowLeft":
      return edges.find(([, to]) => to === at)?.[0] ?? at;
    case "ArrowRight":
      return edges.find(([from]) => from === at)?.[1] ?? at;
    case "ArrowUp":
      return inLayer(nodes[index - 1]);
    case "ArrowDown":
      return inLayer(nodes[index + 1]);
    case "Home":
      return nodes[0] ?? null;
    case "End":
      return nodes[nodes.length - 1] ?? null;
    default:
      return null;
  }
}
