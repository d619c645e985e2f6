// The prefix tree as the page knows it: the nodes that `watched` events reported, with what changed lately.
//
// Events carry deltas. `apply` merges one; nodes that were evicted stay as ghosts for `GHOST_S`, so that the eye can
// follow what went. All times are seconds of the clock that the caller passes in.

import type { TreeDelta, TreeNode } from "agentflow-client";

/** `hit`: an existing node that was used since the last event. `evicted`: a ghost. */
export type NodeState = "in_use" | "hit" | "cached" | "evicted";

export interface PrefixNode {
  readonly id: number;
  parent: number;
  numTokens: number;
  numGenerated: number;
  locks: number;
  keeps: number;
  tenant: string;
  /** When it was used last. */
  usedS: number;
  /** When a later request used it again; null if none did while the page watched. */
  hitS: number | null;
  /** When it was evicted; null while it is in the tree. */
  goneS: number | null;
  /** In the order of their ids, so that nodes keep their places. */
  children: PrefixNode[];
}

/** How long a node counts as just hit. */
export const HIT_S = 2;
/** How long an evicted node is still drawn. */
export const GHOST_S = 3;
const SAME_USE_S = 0.05;

export class PrefixTree {
  /** The root, which has no tokens. */
  readonly root: PrefixNode = newNode(0, 0);
  /** Nodes of the server's tree that the events leave out. */
  numLeftOut = 0;
  private readonly nodes = new Map<number, PrefixNode>([[0, this.root]]);

  /** The node with this id, ghosts included. */
  node(id: number): PrefixNode | undefined {
    return this.nodes.get(id);
  }

  /** Nodes without the root and without ghosts. */
  get numNodes(): number {
    let number = 0;
    for (const node of this.nodes.values()) number += node.goneS === null ? 1 : 0;
    return number - 1;
  }

  /** Merges an event that was received at `nowS`. */
  apply(delta: TreeDelta, nowS: number): void {
    this.forgetGhosts(nowS); // nothing else does where no picture is drawn: in a hidden tab, and of the outline
    if (delta.reset) this.clear();
    this.numLeftOut = delta.num_nodes_left_out ?? 0;
    const nodes = delta.nodes ?? [];
    const before = new Map<number, number>();
    for (const [id] of nodes) {
      const known = this.nodes.get(id);
      if (known !== undefined) before.set(id, known.numTokens);
    }
    for (const row of nodes) this.merge(row, delta.tenants ?? [], nowS);
    for (const row of nodes) this.place(this.nodes.get(row[0]), row[1]);
    for (const id of delta.gone ?? []) this.evict(id, nowS, before);
  }

  /** The event without the nodes that came and went since the last one was applied. */
  withoutUnknown(delta: TreeDelta): TreeDelta {
    return { ...delta, gone: (delta.gone ?? []).filter((id) => this.nodes.has(id)) };
  }

  /** Removes ghosts whose time is over; true if there were any. */
  forgetGhosts(nowS: number): boolean {
    let found = false;
    for (const node of [...this.nodes.values()]) {
      if (node.goneS === null || nowS - node.goneS < GHOST_S) continue;
      this.remove(node);
      found = true;
    }
    return found;
  }

  /** Whether something on it still changes with time alone. */
  isFading(nowS: number): boolean {
    for (const node of this.nodes.values()) {
      if (node.goneS !== null || (node.hitS !== null && nowS - node.hitS < HIT_S)) return true;
    }
    return false;
  }

  /** The nodes from the root's child down to `node`. */
  pathTo(node: PrefixNode): PrefixNode[] {
    const path: PrefixNode[] = [];
    for (
      let at: PrefixNode | undefined = node;
      at !== undefined && at.id !== 0;
      at = this.nodes.get(at.parent)
    ) {
      path.push(at);
      if (path.length > this.nodes.size) break; // a server that sends a circle
    }
    return path.reverse();
  }

  private clear(): void {
    this.nodes.clear();
    this.root.children = [];
    this.nodes.set(0, this.root);
  }

  private merge(row: TreeNode, tenants: readonly string[], nowS: number): void {
    const [id, , numTokens, numGenerated, locks, keeps, ageS, tenant] = row;
    if (id === 0) return;
    const usedS = nowS - ageS;
    let node = this.nodes.get(id);
    if (node === undefined || node.goneS !== null) {
      if (node !== undefined) this.remove(node);
      node = newNode(id, usedS);
      this.nodes.set(id, node);
      node.parent = -1; // not placed yet
    } else if (usedS > node.usedS + SAME_USE_S && locks >= node.locks) {
      node.hitS = nowS;
    }
    Object.assign(node, { numTokens, numGenerated, locks, keeps, usedS: Math.max(usedS, node.usedS) });
    node.tenant = tenants[tenant] ?? "";
  }

  private place(node: PrefixNode | undefined, parentId: number): void {
    if (node === undefined || node.id === 0) return;
    const parent = this.nodes.get(parentId) ?? this.root;
    if (node.parent === parent.id && parent.children.includes(node)) return;
    this.detach(node);
    node.parent = parent.id;
    insert(parent.children, node);
  }

  private detach(node: PrefixNode): void {
    const siblings = this.nodes.get(node.parent)?.children;
    const index = siblings?.indexOf(node) ?? -1;
    if (index >= 0) siblings?.splice(index, 1);
  }

  private evict(id: number, nowS: number, before: ReadonlyMap<number, number>): void {
    const node = this.nodes.get(id);
    if (node === undefined || id === 0 || node.goneS !== null) return;
    // A parent that grew by its only child was merged with it: nothing was evicted. The same holds for a child.
    const grew = (other: PrefixNode | undefined): boolean => {
      const old = other === undefined ? undefined : before.get(other.id);
      return other !== undefined && old !== undefined && other.numTokens - old >= node.numTokens;
    };
    if (grew(this.nodes.get(node.parent)) || node.children.some(grew)) this.remove(node);
    else node.goneS = nowS;
    node.locks = 0;
  }

  /** Takes the node out; children that are still there move up to its parent. */
  private remove(node: PrefixNode): void {
    this.detach(node);
    this.nodes.delete(node.id);
    const parent = this.nodes.get(node.parent) ?? this.root;
    for (const child of node.children) {
      child.parent = parent.id;
      insert(parent.children, child);
    }
    node.children = [];
  }
}

/** The state that is drawn, from the most to the least urgent. */
export function stateOf(node: PrefixNode, nowS: number): NodeState {
  if (node.goneS !== null) return "evicted";
  if (node.hitS !== null && nowS - node.hitS < HIT_S) return "hit";
  return node.locks > 0 ? "in_use" : "cached";
}

function newNode(id: number, usedS: number): PrefixNode {
  return {
    id,
    parent: 0,
    numTokens: 0,
    numGenerated: 0,
    locks: 0,
    keeps: 0,
    tenant: "",
    usedS,
    hitS: null,
    goneS: null,
    children: [],
  };
}

/** Keeps the order of ids. */
function insert(siblings: PrefixNode[], node: PrefixNode): void {
  let [low, high] = [0, siblings.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((siblings[middle] as PrefixNode).id < node.id) low = middle + 1;
    else high = middle;
  }
  siblings.splice(low, 0, node);
}
