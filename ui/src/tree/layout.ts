// Where each node of the prefix tree stands.
//
// A context reads from left to right: a node begins where its parent ends, and is as wide as it has tokens. It is as
// high as it has different continuations, so a prefix that many requests share is one tall block, and each row is
// one context from its first token to its last. Positions are in tokens (x) and rows (y); `view` maps them to
// pixels.

import type { PrefixNode } from "./prefixes";

export interface Block {
  readonly node: PrefixNode;
  readonly depth: number;
  /** Tokens before it, by the scale of the layout. */
  readonly x: number;
  readonly width: number;
  /** Rows above it. */
  readonly y: number;
  readonly rows: number;
}

export interface TreeLayout {
  /** In the order of their rows: a parent before its children. */
  readonly blocks: readonly Block[];
  readonly byId: ReadonlyMap<number, Block>;
  readonly width: number;
  readonly rows: number;
}

/** `tokens`: to scale. `even`: long nodes are shortened, so that short ones next to them can be seen. */
export type Scale = "tokens" | "even";

/** The drawn width of a node with this many tokens. */
export function widthOf(numTokens: number, scale: Scale): number {
  return scale === "tokens" ? Math.max(numTokens, 0.5) : 8 * Math.log2(1 + Math.max(numTokens, 1));
}

/** Lays out everything below `root`. The tree may be as deep as it has nodes. */
export function layOut(root: PrefixNode, scale: Scale): TreeLayout {
  const rowsOf = countRows(root);
  const blocks: Block[] = [];
  const byId = new Map<number, Block>();
  let width = 0;
  interface Waiting {
    node: PrefixNode;
    depth: number;
    x: number;
    y: number;
  }
  const waiting: Waiting[] = [{ node: root, depth: -1, x: 0, y: 0 }];
  while (waiting.length > 0) {
    const { node, depth, x, y } = waiting.pop() as Waiting;
    let end = x;
    if (node !== root) {
      const block = { node, depth, x, width: widthOf(node.numTokens, scale), y, rows: rowsOf.get(node) ?? 1 };
      blocks.push(block);
      byId.set(node.id, block);
      end = x + block.width;
      width = Math.max(width, end);
    }
    let below = y;
    const placed: Waiting[] = [];
    for (const child of node.children) {
      placed.push({ node: child, depth: depth + 1, x: end, y: below });
      below += rowsOf.get(child) ?? 1;
    }
    waiting.push(...placed.reverse());
  }
  return { blocks, byId, width, rows: root.children.length === 0 ? 0 : (rowsOf.get(root) ?? 0) };
}

function countRows(root: PrefixNode): Map<PrefixNode, number> {
  const order: PrefixNode[] = [root];
  for (const node of order) {
    for (const child of node.children) order.push(child);
  }
  const rows = new Map<PrefixNode, number>();
  for (let i = order.length - 1; i >= 0; i--) {
    const node = order[i] as PrefixNode;
    let sum = 0;
    for (const child of node.children) sum += rows.get(child) ?? 1;
    rows.set(node, Math.max(1, sum));
  }
  return rows;
}

/** The block at a position in tokens and rows; null if there is none. */
export function blockAt(layout: TreeLayout, x: number, y: number): Block | null {
  if (x < 0 || y < 0) return null;
  // Blocks lie in the order of their first rows, deeper ones later: the last that begins at or above y in each depth
  // is the only candidate, and candidates nest.
  let [low, high] = [0, layout.blocks.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((layout.blocks[middle] as Block).y <= y) low = middle + 1;
    else high = middle;
  }
  let block = layout.blocks[low - 1];
  while (block !== undefined) {
    if (block.y + block.rows > y && x >= block.x) return x < block.x + block.width ? block : null;
    block = layout.byId.get(block.node.parent);
  }
  return null;
}

export type Move = "parent" | "child" | "next" | "previous" | "first" | "last";

/** The node to which a key moves the focus, or the same one where there is none. `next` and `previous` stay in the
 * column where they can: to the nearest block at the same depth, else to the next one at all. */
export function moved(layout: TreeLayout, from: number | null, move: Move): number | null {
  const { blocks } = layout;
  const first = blocks[0]?.node.id ?? null;
  const block = from === null ? undefined : layout.byId.get(from);
  if (block === undefined) return first;
  switch (move) {
    case "first":
      return first;
    case "last":
      return blocks[blocks.length - 1]?.node.id ?? null;
    case "parent":
      return layout.byId.has(block.node.parent) ? block.node.parent : block.node.id;
    case "child":
      return block.node.children[0]?.id ?? block.node.id;
    default:
      return neighbour(layout, block, move === "next" ? 1 : -1);
  }
}

function neighbour(layout: TreeLayout, block: Block, step: 1 | -1): number {
  const start = layout.blocks.indexOf(block);
  let shallower: Block | undefined;
  for (let i = start + step; i >= 0 && i < layout.blocks.length; i += step) {
    const other = layout.blocks[i] as Block;
    if (other.depth === block.depth) return other.node.id;
    const isApart = other.y >= block.y + block.rows || other.y + other.rows <= block.y;
    if (isApart && other.depth < block.depth) shallower ??= other;
  }
  return shallower?.node.id ?? block.node.id;
}
