import { mergeWatched, type Session, type TreeDelta, type TreeNode, type Watched } from "agentflow-client";
import { describe, expect, it } from "vitest";
import { blockAt, layOut, moved, type Block } from "./layout";
import { GHOST_S, HIT_S, PrefixTree, stateOf, type PrefixNode } from "./prefixes";
import { AXIS, outlined } from "./picture";
import { Texts } from "./texts";
import { bounded, fitted, panned, revealed, zoomed, type Extent } from "./view";

const row = (
  id: number,
  parent: number,
  tokens = 10,
  more: Partial<Record<"locks" | "age" | "tenant", number>> = {},
): TreeNode => [id, parent, tokens, 0, more.locks ?? 0, 0, more.age ?? 1, more.tenant ?? 0];
const delta = (nodes: TreeNode[], gone: number[] = [], reset = false): TreeDelta => ({
  reset,
  nodes,
  gone,
  tenants: ["a", "b"],
  num_nodes_left_out: 3,
});

/** A prefix of 10 tokens with two continuations, of which one has two more. */
function small(): PrefixTree {
  const tree = new PrefixTree();
  tree.apply(delta([row(1, 0), row(2, 1, 4), row(3, 1, 6), row(4, 3, 2, { tenant: 1 }), row(5, 3, 1)]), 0);
  return tree;
}

/** A seeded generator, so that failures repeat. */
function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

describe("PrefixTree", () => {
  it("merges new and changed nodes", () => {
    const tree = small();
    expect(tree.numNodes).toBe(5);
    expect(tree.numLeftOut).toBe(3);
    expect(tree.root.children.map((node) => node.id)).toEqual([1]);
    expect(tree.node(3)?.children.map((node) => [node.id, node.tenant])).toEqual([
      [4, "b"],
      [5, "a"],
    ]);
    tree.apply(delta([row(3, 1, 7, { locks: 1 })]), 1);
    expect(tree.node(3)).toMatchObject({ numTokens: 7, locks: 1 });
    expect(tree.pathTo(tree.node(5)!).map((node) => node.id)).toEqual([1, 3, 5]);
  });

  it("moves nodes below a node that a split put above them", () => {
    const tree = small();
    tree.apply(delta([row(9, 1, 3), row(3, 9, 3)]), 1);
    expect(tree.node(1)?.children.map((node) => node.id)).toEqual([2, 9]);
    expect(tree.node(9)?.children.map((node) => node.id)).toEqual([3]);
    expect(tree.node(3)?.children).toHaveLength(2);
  });

  it("f37: forgets what was evicted, also where no picture is drawn", () => {
    const tree = new PrefixTree();
    for (let look = 1; look <= 2000; look++) tree.apply(delta([row(look, 0)], [look - 1]), look / 2);
    expect(tree.root.children.length).toBeLessThan(2 * GHOST_S + 3);
    expect(tree.node(1)).toBeUndefined();
  });

  it("f37: keeps no nodes that came and went while it is paused", () => {
    const tree = small();
    let missed: Watched = { tree: delta([], [2]) };
    for (let look = 100; look < 2000; look++) {
      missed = mergeWatched(missed, { tree: delta([row(look, 0)], look > 100 ? [look - 1] : []) });
      missed = { ...missed, tree: tree.withoutUnknown(missed.tree!) };
    }
    expect(missed.tree?.gone).toEqual([2]);
    tree.apply(missed.tree!, 1);
    tree.forgetGhosts(1 + GHOST_S);
    expect(tree.root.children.map(({ id }) => id)).toEqual([1, 1999]);
    expect(tree.numNodes).toBe(5);
  });

  it("shows nodes that are used again as hit, for a while", () => {
    const tree = small();
    expect(stateOf(tree.node(1)!, 0)).toBe("cached");
    tree.apply(delta([row(1, 0, 10, { locks: 1, age: 0 })]), 5);
    expect(stateOf(tree.node(1)!, 5)).toBe("hit");
    expect(tree.isFading(5)).toBe(true);
    expect(stateOf(tree.node(1)!, 5 + HIT_S)).toBe("in_use");
    expect(tree.isFading(5 + HIT_S)).toBe(false);
    tree.apply(delta([row(1, 0, 10, { locks: 0, age: 3 })]), 8); // no later use
    expect(stateOf(tree.node(1)!, 8)).toBe("cached");
  });

  it("keeps evicted nodes as ghosts, for a while", () => {
    const tree = small();
    tree.apply(delta([], [4, 5, 77]), 5);
    expect(stateOf(tree.node(4)!, 5)).toBe("evicted");
    expect(tree.numNodes).toBe(3);
    expect(tree.forgetGhosts(5 + GHOST_S / 2)).toBe(false);
    expect(tree.forgetGhosts(5 + GHOST_S)).toBe(true);
    expect(tree.node(4)).toBeUndefined();
    expect(tree.node(3)?.children).toEqual([]);
  });

  it("takes a node that comes back, and one that was merged with its parent, for no eviction", () => {
    const tree = small();
    tree.apply(delta([], [5]), 5);
    tree.apply(delta([row(5, 3, 8)]), 6);
    expect(stateOf(tree.node(5)!, 6)).toBe("cached");
    tree.apply(delta([row(2, 1, 4)], [4]), 7);
    tree.apply(delta([row(3, 1, 6 + 8)], [5]), 8);
    expect(tree.node(5)).toBeUndefined();
    expect(stateOf(tree.node(4)!, 8)).toBe("evicted");
  });

  it("forgets everything at a reset", () => {
    const tree = small();
    tree.apply(delta([row(8, 0)], [], true), 1);
    expect(tree.numNodes).toBe(1);
    expect(tree.root.children.map((node) => node.id)).toEqual([8]);
  });

  it("equals a tree that is built anew, after any number of deltas", () => {
    const next = random(7);
    const tree = new PrefixTree();
    const model = new Map<number, { parent: number; tokens: number }>();
    for (let step = 0, id = 1; step < 200; step++) {
      const ids = [0, ...model.keys()];
      const nodes: TreeNode[] = [];
      const gone: number[] = [];
      const leaves = ids.filter(
        (one) => one !== 0 && ![...model.values()].some((node) => node.parent === one),
      );
      const leaf = leaves[Math.floor(next() * leaves.length)];
      if (leaf !== undefined && next() < 0.45) {
        model.delete(leaf);
        gone.push(leaf);
      } else {
        const parent = ids[Math.floor(next() * ids.length)] as number;
        const tokens = 1 + Math.floor(next() * 50);
        model.set(id, { parent, tokens });
        nodes.push(row(id++, parent, tokens));
      }
      tree.apply(delta(nodes, gone), step * 10);
      tree.forgetGhosts(step * 10 + 9);
      expect(tree.numNodes).toBe(model.size);
      for (const [key, { parent, tokens }] of model) {
        expect(tree.node(key)).toMatchObject({ parent, numTokens: tokens });
        expect(tree.node(parent)?.children).toContain(tree.node(key));
      }
    }
  });
});

describe("layOut", () => {
  const place = ({ x, width, y, rows }: Block) => [x, width, y, rows];

  it("puts nodes behind their parents, as wide as their tokens and as high as their rows", () => {
    const layout = layOut(small().root, "tokens");
    expect([layout.width, layout.rows]).toEqual([18, 3]);
    expect(Object.fromEntries([...layout.byId].map(([id, block]) => [id, place(block)]))).toEqual({
      1: [0, 10, 0, 3],
      2: [10, 4, 0, 1],
      3: [10, 6, 1, 2],
      4: [16, 2, 1, 1],
      5: [16, 1, 2, 1],
    });
  });

  it("keeps the order of widths on the even scale", () => {
    const layout = layOut(small().root, "even");
    const width = (id: number) => layout.byId.get(id)!.width;
    expect(width(1)).toBeGreaterThan(width(3));
    expect(width(1) / width(5)).toBeLessThan(10);
  });

  it("finds the block at each position, as a search through all blocks does", () => {
    const next = random(3);
    for (let round = 0; round < 8; round++) {
      const tree = new PrefixTree();
      for (let id = 1; id <= 60; id++) {
        const parent = Math.floor(next() * id);
        tree.apply(delta([row(id, parent, 1 + Math.floor(next() * 9))]), 0);
      }
      const layout = layOut(tree.root, "tokens");
      for (let i = 0; i < 120; i++) {
        const [x, y] = [next() * (layout.width + 4) - 2, next() * (layout.rows + 2) - 1];
        const found = layout.blocks.filter(
          (block) => x >= block.x && x < block.x + block.width && y >= block.y && y < block.y + block.rows,
        );
        expect(found.length).toBeLessThanOrEqual(1);
        expect(blockAt(layout, x, y)).toBe(found[0] ?? null);
      }
    }
  });

  it("lays out a chain of 5,000 nodes", () => {
    const tree = new PrefixTree();
    tree.apply(delta(Array.from({ length: 5000 }, (_, i) => row(i + 1, i, 1))), 0);
    expect(layOut(tree.root, "tokens")).toMatchObject({ width: 5000, rows: 1 });
  });

  it("is empty for an empty tree", () => {
    const layout = layOut(new PrefixTree().root, "tokens");
    expect(layout).toMatchObject({ blocks: [], width: 0, rows: 0 });
    expect(blockAt(layout, 0, 0)).toBeNull();
    expect(moved(layout, null, "next")).toBeNull();
  });
});

describe("moved", () => {
  const layout = layOut(small().root, "tokens");

  it.each([
    [null, "next", 1],
    [1, "child", 2],
    [2, "next", 3],
    [3, "child", 4],
    [4, "next", 5],
    [5, "next", 5],
    [5, "parent", 3],
    [3, "previous", 2],
    [4, "previous", 2],
    [1, "parent", 1],
    [4, "child", 4],
    [4, "first", 1],
    [1, "last", 5],
  ] as const)("moves from %s by %s to %s", (from, move, to) => {
    expect(moved(layout, from, move)).toBe(to);
  });
});

describe("the view", () => {
  const extent: Extent = { width: 1000, rows: 100, pixelWidth: 500, pixelHeight: 300 };

  it("fits the width, and scrolls rows that would be too low", () => {
    expect(fitted(extent)).toEqual({ left: 0, top: 0, perToken: 0.5, perRow: 7 });
    expect(fitted({ ...extent, rows: 10 }).perRow).toBe(30);
    expect(fitted({ ...extent, width: 0, rows: 0 })).toMatchObject({ left: 0, top: 0 });
  });

  it("zooms around a point that stays where it is", () => {
    const view = zoomed(fitted(extent), extent, 4, 200, 100);
    expect(view.perToken).toBe(2);
    expect(view.left + 200 / view.perToken).toBeCloseTo(400);
    expect(view.top + 100 / view.perRow).toBeCloseTo(100 / 7);
    expect(zoomed(view, extent, 1 / 100, 0, 0).perToken).toBe(0.5);
  });

  it("pans up to the edges", () => {
    const view = zoomed(fitted(extent), extent, 4, 0, 0);
    expect(panned(view, extent, -100, 0).left).toBe(50);
    expect(panned(view, extent, 1e9, 1e9)).toMatchObject({ left: 0, top: 0 });
    expect(panned(view, extent, -1e9, 0).left).toBe(750);
    expect(bounded({ ...view, left: -5, top: 1e6 }, extent)).toMatchObject({
      left: 0,
      top: 100 - 300 / view.perRow,
    });
  });

  it("reveals an area, and moves no further than it must", () => {
    const view = zoomed(fitted(extent), extent, 4, 0, 0);
    expect(revealed(view, extent, { x: 10, y: 0, width: 20, rows: 1 }, false)).toEqual(view);
    expect(revealed(view, extent, { x: 600, y: 0, width: 50, rows: 1 }, false).left).toBe(400);
    expect(revealed(view, extent, { x: 600, y: 0, width: 350, rows: 1 }, false).left).toBe(600);
    const filled = revealed(view, extent, { x: 600, y: 50, width: 90, rows: 2 }, true);
    expect(filled.perToken * 90).toBeCloseTo(450);
    expect(filled.left).toBeLessThan(600);
  });
});

describe("the texts of nodes", () => {
  const node = (id: number) => ({ id, numTokens: 5 }) as PrefixNode;

  /** Answers when the test says so. */
  function slowSession() {
    const answers: ((text: string) => void)[] = [];
    const peek = () => new Promise((resolve) => answers.push((text) => resolve({ text, numTokens: 5 })));
    return { from: { peek } as unknown as Session, answer: (text: string) => answers.shift()!(text) };
  }

  it("keeps the newest labels when there are too many", async () => {
    const texts = new Texts();
    const { from, answer } = slowSession();
    for (let id = 1; id <= 2001; id++) {
      const asked = texts.ask(from, node(id));
      answer(`text ${id}`);
      await asked;
    }
    expect(texts.find(node(2001))).toMatchObject({ text: "text 2001" });
    expect(texts.labels.get(2001)).toBe("text 2001");
  });

  it("f37: belong to the present node, and not to an earlier one with the same id", async () => {
    const texts = new Texts();
    const { from, answer } = slowSession();
    const one = node(1);
    const first = texts.keyOf(one);
    texts.clear();
    expect(texts.keyOf(one)).not.toBe(first);
    const asked = texts.ask(from, one);
    one.numTokens -= 1; // it was divided
    answer("all of it");
    expect((await asked).kind).toBe("failed");
    expect([texts.find(one), texts.labels.get(1)]).toEqual([undefined, undefined]);
  });

  it("drops an answer about a tree that was replaced meanwhile", async () => {
    const texts = new Texts();
    const { from, answer } = slowSession();
    const asked = texts.ask(from, node(1));
    texts.clear();
    answer("of the tree before");
    expect((await asked).kind).toBe("failed");
    expect(texts.find(node(1))).toBeUndefined();
    const again = texts.ask(from, node(1));
    answer("of this tree");
    await again;
    expect(texts.labels.get(1)).toBe("of this tree");
  });
});

describe("the outline of a block", () => {
  const shown = { width: 400, height: 200 };

  it("f37: is around it, and inside the picture where the block ends at an edge", () => {
    expect(outlined({ x: 100, y: 100, width: 50, height: 30 }, 3, shown)).toEqual({
      x: 98.5,
      y: 98.5,
      width: 53,
      height: 33,
    });
    expect(outlined({ x: 0, y: AXIS, width: 400, height: 200 - AXIS }, 3, shown)).toEqual({
      x: 1.5,
      y: AXIS + 1.5,
      width: 397,
      height: 197 - AXIS,
    });
  });

  it("f37: is open where the block goes on beyond an edge", () => {
    const { x, y, width, height } = outlined({ x: -20, y: AXIS - 20, width: 500, height: 300 }, 3, shown);
    expect([x, y, x + width, y + height]).toEqual([-21.5, AXIS - 21.5, 481.5, AXIS + 281.5]);
  });
});
