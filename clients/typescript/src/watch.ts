// What `session.watch` gives: the scheduler, the radix tree and the programs, as they change.

import type { GraphDelta, GraphsDelta, LiveNode, LiveState, TreeDelta, TreeNode, WatchedEvent } from "./protocol.js";

/** One look at the server: what has changed since the one before. */
export type Watched = Omit<WatchedEvent, "event" | "ticket">;

/** Options of `session.watch`. */
export interface WatchOptions {
  /** Whether steps of the scheduler are reported; by default they are. */
  steps?: boolean | undefined;
  /** Whether the radix tree is reported; by default it is. */
  tree?: boolean | undefined;
  /** Whether the live graphs of the tenant's sessions and programs are reported; by default they are not. */
  graphs?: boolean | undefined;
  /** The least number of seconds between two looks: 0.1 to 60; by default 0.5. */
  intervalS?: number | undefined;
  /** The largest number of nodes of the tree: 1 to 5000; by default 1000. */
  maxNodes?: number | undefined;
  /** Ends the watch. */
  signal?: AbortSignal | undefined;
}

const MAX_STEPS = 512;

/** Both looks as one: a slow reader skips none of the changes, and the memory has a limit. */
export function mergeWatched(older: Watched, newer: Watched): Watched {
  const steps = [...(older.steps ?? []), ...(newer.steps ?? [])];
  const numDropped = Math.max(0, steps.length - MAX_STEPS);
  const merged: Watched = {
    ...newer,
    steps: steps.slice(numDropped),
    steps_skipped: (older.steps_skipped ?? 0) + (newer.steps_skipped ?? 0) + numDropped,
  };
  const tree = mergeTrees(older, newer);
  if (tree) merged.tree = tree;
  const graphs = mergeGraphs(older.graphs ?? undefined, newer.graphs ?? undefined);
  if (graphs) merged.graphs = graphs;
  return merged;
}

function mergeGraphs(older: GraphsDelta | undefined, newer: GraphsDelta | undefined): GraphsDelta | undefined {
  if (!older || !newer || newer.reset) return newer ?? older;
  const graphs = new Map((older.graphs ?? []).map((graph) => [graph.id, graph]));
  for (const id of newer.gone ?? []) graphs.delete(id);
  for (const graph of newer.graphs ?? []) graphs.set(graph.id, mergeGraph(graphs.get(graph.id), graph));
  const gone = [...(older.gone ?? []), ...(newer.gone ?? [])];
  return { ...newer, reset: older.reset ?? false, graphs: [...graphs.values()], gone };
}

function mergeGraph(older: GraphDelta | undefined, newer: GraphDelta): GraphDelta {
  if (!older) return newer;
  const [states, statesGone] = mergeParts(older.states, older.states_gone, newer.states, newer.states_gone);
  const [nodes, nodesGone] = mergeParts(older.nodes, older.nodes_gone, newer.nodes, newer.nodes_gone);
  return { ...newer, states, nodes, states_gone: statesGone, nodes_gone: nodesGone };
}

function mergeParts<T extends { id: number }>(
  older: T[] = [],
  olderGone: number[] = [],
  newer: T[] = [],
  newerGone: number[] = [],
): [T[], number[]] {
  const parts = new Map(older.map((part) => [part.id, part]));
  for (const id of newerGone) parts.delete(id);
  for (const part of newer) parts.set(part.id, part);
  return [[...parts.values()], [...new Set([...olderGone, ...newerGone])]];
}

function mergeTrees(olderLook: Watched, newerLook: Watched): TreeDelta | undefined {
  const older = agedTree(olderLook, (newerLook.time_s ?? 0) - (olderLook.time_s ?? 0));
  const newer = newerLook.tree ?? undefined;
  if (!older || !newer || newer.reset) return newer ?? older;
  const nodes = new Map((older.nodes ?? []).map((node) => [node[0], node]));
  const gone = new Set(older.gone ?? []);
  for (const id of newer.gone ?? []) {
    nodes.delete(id);
    gone.add(id);
  }
  for (const node of newer.nodes ?? []) {
    nodes.set(node[0], node);
    gone.delete(node[0]);
  }
  return { ...newer, reset: older.reset ?? false, nodes: [...nodes.values()], gone: [...gone] };
}

/** The tree, whose nodes are so many seconds older. */
function agedTree({ tree }: Watched, seconds: number): TreeDelta | undefined {
  const aged = tree?.nodes?.map((node): TreeNode => {
    const [id, parent, numTokens, numGenerated, locks, keeps, ageS, tenant] = node;
    return [id, parent, numTokens, numGenerated, locks, keeps, ageS + seconds, tenant];
  });
  return tree && aged ? { ...tree, nodes: aged } : (tree ?? undefined);
}

/** A node of the radix tree: a run of tokens. */
export interface TreeViewNode {
  readonly id: number;
  /** 0 at the top. */
  readonly parent: number;
  readonly numTokens: number;
  /** Of its tokens, those that were generated. */
  readonly numGenerated: number;
  /** Running requests that use it. */
  readonly locks: number;
  /** Open states that end here. */
  readonly keeps: number;
  /** When it was last used, in seconds of the engine's clock (`Watched.time_s`). */
  readonly usedAtS: number;
  readonly tenant: string;
}

/** The radix tree that the deltas of a watch describe. */
export class TreeView {
  readonly nodes = new Map<number, TreeViewNode>();
  readonly #children = new Map<number, Set<number>>();
  #numLeftOut = 0;

  /** The number of nodes of the tree that are not among `nodes`. */
  get numLeftOut(): number {
    return this.#numLeftOut;
  }

  /** The ids of the nodes below a node; 0: at the top. */
  children(id: number): Iterable<number> {
    return this.#children.get(id) ?? [];
  }

  /** Applies what has changed. Returns the nodes that are new or changed, and those that are gone. */
  apply(watched: Watched): { changed: TreeViewNode[]; gone: TreeViewNode[] } {
    const { tree } = watched;
    if (!tree) return { changed: [], gone: [] };
    const gone: TreeViewNode[] = [];
    for (const id of tree.reset ? [...this.nodes.keys()] : (tree.gone ?? [])) {
      const node = this.nodes.get(id);
      if (!node) continue;
      this.nodes.delete(id);
      this.#unlink(node);
      gone.push(node);
    }
    const tenants = tree.tenants ?? [];
    const changed: TreeViewNode[] = [];
    for (const [id, parent, numTokens, numGenerated, locks, keeps, ageS, tenant] of tree.nodes ?? []) {
      const before = this.nodes.get(id);
      if (before && before.parent !== parent) this.#unlink(before);
      const node: TreeViewNode = {
        id,
        parent,
        numTokens,
        numGenerated,
        locks,
        keeps,
        usedAtS: (watched.time_s ?? 0) - ageS,
        tenant: tenants[tenant] ?? "",
      };
      this.nodes.set(id, node);
      const siblings = this.#children.get(parent) ?? new Set();
      this.#children.set(parent, siblings.add(id));
      changed.push(node);
    }
    this.#numLeftOut = tree.num_nodes_left_out ?? 0;
    return { changed, gone };
  }

  #unlink(node: TreeViewNode): void {
    const siblings = this.#children.get(node.parent);
    siblings?.delete(node.id);
    if (!siblings?.size) this.#children.delete(node.parent);
  }
}

/** The live graph of one session or program. */
export interface GraphView {
  readonly states: Map<number, LiveState>;
  readonly nodes: Map<number, LiveNode>;
  numStatesLeftOut: number;
  numNodesLeftOut: number;
}

/** The live graphs that the deltas of a watch describe, by their ids. The session that watches has the id 1. */
export class GraphsView {
  readonly graphs = new Map<number, GraphView>();

  /** Applies what has changed. */
  apply({ graphs }: Watched): void {
    if (!graphs) return;
    if (graphs.reset) this.graphs.clear();
    for (const id of graphs.gone ?? []) this.graphs.delete(id);
    for (const delta of graphs.graphs ?? []) {
      const graph = this.graphs.get(delta.id) ?? {
        states: new Map<number, LiveState>(),
        nodes: new Map<number, LiveNode>(),
        numStatesLeftOut: 0,
        numNodesLeftOut: 0,
      };
      this.graphs.set(delta.id, graph);
      for (const id of delta.states_gone ?? []) graph.states.delete(id);
      for (const id of delta.nodes_gone ?? []) graph.nodes.delete(id);
      for (const state of delta.states ?? []) graph.states.set(state.id, state);
      for (const node of delta.nodes ?? []) graph.nodes.set(node.id, node);
      graph.numStatesLeftOut = delta.num_states_left_out ?? 0;
      graph.numNodesLeftOut = delta.num_nodes_left_out ?? 0;
    }
  }
}
