// Deltas of a watch: merged ones give the same tree as each by itself.

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import type { TreeNode } from "../src/protocol.js";
import { connect } from "../src/session.js";
import { GraphsView, mergeWatched, TreeView, type Watched } from "../src/watch.js";
import { FakeServer, settle, turn } from "./support/fake_server.js";

const id = fc.integer({ min: 1, max: 8 });
const node = fc
  .tuple(id, fc.nat({ max: 8 }), fc.nat({ max: 50 }), fc.integer({ min: 0, max: 1 }))
  .map(([own, parent, tokens, tenant]): TreeNode => [own, parent, tokens, 0, 0, 0, 0, tenant]);
const looks = fc.array(
  fc.record({
    reset: fc.boolean(),
    nodes: fc.uniqueArray(node, { selector: ([own]) => own }),
    gone: fc.uniqueArray(id),
    isNext: fc.boolean(), // the reader is fast enough to get this look by itself
    numSteps: fc.nat({ max: 300 }),
  }),
  { minLength: 1, maxLength: 12 },
);

test("a slow reader sees the same tree, and counts the same steps", () => {
  fc.assert(
    fc.property(looks, (given) => {
      const fast = new TreeView();
      const slow = new TreeView();
      let pending: Watched | undefined;
      let numSteps = 0;
      let numSeen = 0;
      for (const [index, { reset, nodes, gone, isNext, numSteps: num }] of given.entries()) {
        const fresh = new Set(nodes.map(([own]) => own));
        const look: Watched = {
          time_s: index,
          steps: Array.from({ length: num }, () => [++numSteps, 0, 1, 1, 0, 1, 2]),
          tree: { reset, nodes, gone: gone.filter((own) => !fresh.has(own)), tenants: ["ann", "bob"] },
        };
        fast.apply(look);
        pending = pending ? mergeWatched(pending, look) : look;
        if (!isNext && index < given.length - 1) continue;
        slow.apply(pending);
        assert.ok(pending.steps!.length <= 512);
        numSeen += pending.steps!.length + (pending.steps_skipped ?? 0);
        pending = undefined;
      }
      assert.deepEqual(sorted(slow), sorted(fast));
      assert.equal(numSeen, numSteps);
      for (const view of [slow, fast]) {
        for (const [own, { parent }] of view.nodes) assert.ok([...view.children(parent)].includes(own));
        const numChildren = Array.from({ length: 9 }, (_, parent) => [...view.children(parent)].length);
        assert.equal(numChildren.reduce((sum, num) => sum + num), view.nodes.size);
      }
    }),
  );
});

function sorted(view: TreeView): unknown[] {
  return [...view.nodes.values()].sort((a, b) => a.id - b.id);
}

test("a watch begins, merges while the loop is busy, and ends with the loop", async () => {
  const server = new FakeServer();
  const connecting = connect({ url: "ws://fake", WebSocket: server.WebSocket });
  await settle(server);
  const session = await connecting;
  const watch = session.watch({ intervalS: 0.1, tree: false });
  await settle(server);
  const op = server.accepted.at(-1)!;
  assert.ok(op.op === "watch");
  assert.deepEqual(op, { op: "watch", ticket: op.ticket, interval_s: 0.1, tree: false });
  server.send({ event: "watched", ticket: op.ticket, steps: [[1, 0, 1, 1, 0, 5, 1]] });
  server.send({ event: "watched", ticket: op.ticket + 1, steps: [[9, 9, 9, 9, 9, 9, 9]] }); // of another watch
  server.send({ event: "watched", ticket: op.ticket, steps: [[2, 0, 1, 1, 0, 5, 1]] });
  await settle(server);
  for await (const { steps } of watch) {
    assert.deepEqual(steps?.map(([number]) => number), [1, 2]);
    break;
  }
  await settle(server);
  assert.equal(server.accepted.at(-1)!.op, "unwatch");

  const second = session.watch();
  const third = session.watch(); // ends the second
  assert.deepEqual(await second.next(), { done: true, value: undefined });
  await settle(server);
  const ticket = (server.accepted.at(-1) as { ticket: number }).ticket;
  server.send({ event: "watched", ticket, error: { code: "engine_down", message: "it restarts" } });
  await settle(server);
  assert.equal((await third.next()).value.error.code, "engine_down");
  server.send({ event: "watched", ticket, error: { code: "bad_argument", message: "no" } });
  await settle(server);
  await assert.rejects(third.next(), { code: "bad_argument" });
  assert.equal((await third.next()).done, true);
  await turn();
  await Promise.all([session.close(), settle(server)]);
});

const part = fc.record({ id: fc.integer({ min: 1, max: 4 }), program: fc.nat({ max: 3 }) });
const ids = fc.uniqueArray(fc.integer({ min: 1, max: 4 }));
const graphLooks = fc.array(
  fc.record({
    reset: fc.boolean(),
    graphs: fc.uniqueArray(
      fc.record({
        id: fc.integer({ min: 1, max: 3 }),
        states: fc.uniqueArray(part, { selector: ({ id }) => id }),
        nodes: fc.uniqueArray(
          part.map(({ id, program }) => ({ id, state: program, kind: "gen" })),
          { selector: ({ id }) => id },
        ),
        states_gone: ids,
        nodes_gone: ids,
        num_nodes_left_out: fc.nat({ max: 2 }),
      }),
      { selector: ({ id }) => id },
    ),
    gone: ids,
    isNext: fc.boolean(),
  }),
  { minLength: 1, maxLength: 12 },
);

test("a slow reader sees the same graphs", () => {
  fc.assert(
    fc.property(graphLooks, (given) => {
      const fast = new GraphsView();
      const slow = new GraphsView();
      let pending: Watched | undefined;
      for (const [index, { isNext, ...graphs }] of given.entries()) {
        const look: Watched = { graphs };
        fast.apply(look);
        pending = pending ? mergeWatched(pending, look) : look;
        if (!isNext && index < given.length - 1) continue;
        slow.apply(pending);
        pending = undefined;
      }
      assert.deepEqual(slow.graphs, fast.graphs);
    }),
  );
});
