import type { LiveGraph, LiveNode, Watched } from "agentflow-client";
import { describe, expect, it } from "vitest";
import { WatchedGraphs } from "./graphs";
import { neighbour, NODE_HEIGHT, NODE_WIDTH, pictureOf, type PlacedNode } from "./picture";
import { countsOf, factsOf, lineOf, missOf, placeOf, titleOf } from "./words";

const node = (id: number, needs: number[] = [], more: Partial<LiveNode> = {}): LiveNode => ({
  id,
  state: 1,
  kind: "gen",
  name: `n${id}`,
  needs,
  ...more,
});
const at = (nodes: readonly PlacedNode[], id: number): PlacedNode => nodes.find((one) => one.node.id === id)!;

describe("the picture of a graph", () => {
  it("has each node behind what it needs, and no two in one place", () => {
    // Every node needs some of the ten before it.
    const nodes = Array.from({ length: 120 }, (_, i) =>
      node(i + 1, [...new Set([i % 3, i % 7, i % 10])].map((back) => i - back).filter((id) => id > 0), {
        ...(i % 4 === 0 ? { group: 1 + (i % 12) } : {}),
      }),
    );
    const { nodes: placed, edges, width, height } = pictureOf({ nodes }, 1000);
    expect(placed).toHaveLength(120);
    expect(new Set(placed.map(({ x, y }) => `${x} ${y}`)).size).toBe(120);
    for (const [from, to] of edges) expect(from.x + NODE_WIDTH).toBeLessThan(to.x);
    // What a node needs is found along the edges, and no edge is a shortcut.
    const before = new Map<number, Set<number>>();
    for (const { id, needs } of nodes) {
      const direct = edges.filter(([, to]) => to.node.id === id).map(([from]) => from.node.id);
      const byWay = new Set(direct.flatMap((one) => [...before.get(one)!]));
      expect(direct.filter((one) => byWay.has(one))).toEqual([]);
      before.set(id, new Set([...direct, ...byWay]));
      expect(needs!.filter((one) => !before.get(id)!.has(one))).toEqual([]);
      expect(direct.filter((one) => !needs!.includes(one))).toEqual([]);
    }
    for (const { x, y } of placed) {
      expect(x + NODE_WIDTH).toBeLessThan(width);
      expect(y + NODE_HEIGHT).toBeLessThan(height);
    }
  });

  it("has a box around a task group that holds no other node", () => {
    const grouped = [1, 3, 5].map((id) => node(id, [], { group: 1 }));
    const { nodes, groups } = pictureOf({ nodes: [...grouped, node(2), node(4)].sort((a, b) => a.id - b.id) }, 10);
    expect(groups).toHaveLength(1);
    const [box] = groups as [(typeof groups)[number]];
    const isInside = ({ x, y }: PlacedNode): boolean =>
      x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height;
    expect(nodes.filter(isInside).map(({ node: { id } }) => id)).toEqual([1, 3, 5]);
  });

  it("draws what runs before what waits, and counts the rest", () => {
    const nodes = Array.from({ length: 20 }, (_, i) => node(i + 1, [], i === 15 ? { status: "running" } : {}));
    const picture = pictureOf({ nodes, num_nodes_left_out: 3 }, 5);
    expect(picture.nodes.map(({ node: { id } }) => id)).toContain(16);
    expect(picture.nodes).toHaveLength(5);
    expect(picture.numLeftOut).toBe(18);
    expect(pictureOf({ nodes }, 0).nodes).toEqual([]);
  });

  it("is read along its edges and layers", () => {
    const picture = pictureOf({ nodes: [node(1), node(2), node(3, [1, 2]), node(4, [3])] }, 10);
    const move = (id: number, key: string): number | null =>
      neighbour(picture, at(picture.nodes, id), key)?.node.id ?? null;
    expect(move(1, "ArrowRight")).toBe(3);
    expect(move(3, "ArrowLeft")).toBe(1);
    expect(move(1, "ArrowDown")).toBe(2);
    expect(move(2, "ArrowDown")).toBe(2);
    expect(move(2, "ArrowUp")).toBe(1);
    expect(move(1, "ArrowLeft")).toBe(1);
    expect(move(4, "ArrowRight")).toBe(4);
    expect(move(4, "Home")).toBe(1);
    expect(move(1, "End")).toBe(4);
    expect(move(1, "Tab")).toBeNull();
  });
});

describe("words about a graph", () => {
  const graph: LiveGraph = {
    states: ["a", "b", "b", "c", "d"].map((label, i) => ({ id: i + 1, program: 1, label })),
    nodes: [node(1, [], { status: "done" }), node(2, [1], { status: "running", awaited: "stream", group: 2 })],
  };

  it("say what a node is, needs, and is needed by", () => {
    expect(lineOf(graph.nodes![1]!)).toBe("running · latency · streamed");
    expect(lineOf(graph.nodes![0]!)).toBe("done");
    expect(Object.fromEntries(factsOf(graph.nodes![0]!, graph))).toMatchObject({ "Needed by": "n2", Needs: "nothing" });
    expect(Object.fromEntries(factsOf(graph.nodes![1]!, graph))).toMatchObject({ Needs: "n1", State: "1 of a" });
  });

  it("say where a request runs and which images it reads, in a third line", () => {
    const png = { source: "sha256:00", media_type: "image/png", num_bytes: 12_345 };
    const clip = { source: "https://example.org/a.mp4", kind: "video" as const };
    const reads = (more: Partial<LiveNode>) => node(1, [], { status: "running", ...more });
    expect(placeOf(reads({}))).toBe("");
    expect(placeOf(reads({ replica: 0 }))).toBe("replica 0");
    expect(placeOf(reads({ replica: 2, media: [png], num_media: 1 }))).toBe("replica 2 · 1 image");
    expect(placeOf(reads({ media: [png, clip], num_media: 7 }))).toBe("7 images and videos");
    expect(placeOf(reads({ media: [clip], num_media: 2 }))).toBe("2 videos");
    const facts = Object.fromEntries(factsOf(reads({ replica: 0, media: [png, clip], num_media: 7 }), {}));
    expect(facts["Replica"]).toBe("0");
    expect(facts["Images and videos"]).toBe(
      "image/png, 12.3 kB; video, https://example.org/a.mp4; 5 more",
    );
    const [without, withThird] = [{}, { replica: 1 }].map((more) => pictureOf({ nodes: [reads(more)] }, 9));
    expect(withThird!.nodeHeight).toBeGreaterThan(without!.nodeHeight);
    expect(withThird!.height - without!.height).toBe(withThird!.nodeHeight - without!.nodeHeight);
  });

  it("name at most 20 of the nodes that one needs", () => {
    const needs = Array.from({ length: 1000 }, (_, i) => i + 1);
    const many = { nodes: [...needs.map((id) => node(id)), node(1001, needs)] };
    const said = Object.fromEntries(factsOf(many.nodes[1000]!, many))["Needs"]!;
    expect(said.split(", ")).toHaveLength(20);
    expect(said).toMatch(/ and 980 more$/);
  });

  it("name its programs, count its nodes, and explain what was not cached", () => {
    expect(titleOf(graph)).toBe("a, b, c and 1 more");
    expect(titleOf({})).toBe("no program name");
    expect(countsOf(graph)).toBe("1 running");
    expect(missOf("evicted", 1234)).toBe("1,234 tokens: evicted");
    expect(missOf("", 0)).toBe("");
    expect(missOf("later_version", 1)).toBe("1 token: later_version");
  });
});

describe("the watched graphs", () => {
  const watched = (graphs: NonNullable<Watched["graphs"]>): Watched => ({ graphs });
  const session = (id: number) => ({ id, states: [{ id: 1, program: 1 }] });

  it("f37: keep the key of a session while others end, and give it to no other", () => {
    const graphs = new WatchedGraphs();
    graphs.apply(watched({ reset: true, graphs: [session(3), session(2)], num_graphs_left_out: 4 }));
    const [second, third] = graphs.shown().sessions;
    expect([second!.number, third!.number]).toEqual([2, 3]);
    expect(graphs.shown().numLeftOut).toBe(4);
    graphs.apply(watched({ gone: [2], graphs: [session(4)] }));
    const after = graphs.shown();
    expect(after.sessions.map(({ key }) => key)).toEqual([third!.key, expect.not.stringMatching(second!.key)]);
    expect(after.numLeftOut).toBe(0);
    graphs.apply(watched({ reset: true, graphs: [session(1), session(2)] }));
    const keys = [second!, third!, ...after.sessions].map(({ key }) => key);
    for (const { key } of graphs.shown().sessions) expect(keys).not.toContain(key);
  });

  it("leave out sessions without states", () => {
    const graphs = new WatchedGraphs();
    graphs.apply(watched({ reset: true, graphs: [{ ...session(2), nodes: [node(1)] }] }));
    expect(graphs.shown().sessions).toHaveLength(1);
    graphs.apply(watched({ graphs: [{ id: 2, states_gone: [1] }] }));
    expect(graphs.shown().sessions).toEqual([]);
  });
});
