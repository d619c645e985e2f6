// Programs on a real server, for tests/clients/test_typescript.py. Arguments: the scenario's name, and its options
// as JSON. Prints the result as JSON.

import WebSocket from "ws";
import {
  AgentflowError,
  connect,
  Graph,
  image,
  TreeView,
  type ConnectOptions,
  type EmbedOptions,
  type Session,
  type Watched,
} from "../src/index.js";

type Options = ConnectOptions & { prompts: string[]; embed?: EmbedOptions };

const scenarios: Record<string, (options: Options) => Promise<unknown>> = {
  /** The first prompt is shared; each other one is that of a branch. */
  async fork(options) {
    return withSession(options, async (session) => {
      const [shared, ...own] = options.prompts as [string, ...string[]];
      const root = session.state();
      const first = root.text(shared).gen("first");
      const branches = root.fork(own.length);
      const variables = branches.map((branch, index) => branch.text(own[index]!).gen("branch"));
      const streamed = await Promise.all([first, ...variables].map(collected));
      const texts = await Promise.all([first, ...variables]);
      await Promise.all([root, ...branches].map((state) => state.done()));
      const content = await root.read("content", "text");
      for (const state of [root, ...branches]) state.close();
      return { texts, streamed, content, stats: await session.stats() };
    });
  },

  /** Each prompt is that of a branch of a graph; the branches whose prompt says so hang, and are cancelled. */
  async graph(options) {
    return withSession(options, async (session) => {
      const graph = new Graph({ program: "scenario" });
      const input = graph.input("input");
      graph.root.text(input);
      const branches = graph.root.fork(options.prompts.length);
      const outputs = branches.map((branch, index) => branch.text(options.prompts[index]!).gen("branch"));
      const run = session.submit(graph, { live: true, inputs: { input: "The input. " } });
      const results = await Promise.all(
        outputs.map(async (output, index) => {
          const variable = run.variable(output);
          if (!options.prompts[index]!.includes("hang")) return variable;
          for await (const piece of variable) {
            if (piece) break;
          }
          run.cancelBranch(branches[index]!);
          return Promise.resolve(variable).catch((error: AgentflowError) => [variable.text, error.code]);
        }),
      );
      await run.done();
      run.cancel(); // it has ended
      return { results, stats: (await session.stats()).model };
    });
  },

  /** Prints "ready" when the first piece has come; then the connection may break. */
  async dropped(options) {
    return withSession(options, async (session) => {
      const statuses: string[] = [];
      session.onStatus((status) => statuses.push(status));
      const variables = options.prompts.map((prompt) => session.state().text(prompt).gen("text", { maxTokens: 100_000 }));
      const streamed = await Promise.all(variables.map(collected));
      return { texts: await Promise.all(variables), streamed, statuses };
    });
  },

  /** Only the model's name. */
  async model(options) {
    return withSession(options, async (session) => session.model);
  },

  /** A draft on the default model and a judge on the last one; the draft goes on there; with a recording. */
  async models(options) {
    const recording: object[] = [];
    return withSession({ ...options, record: (line) => recording.push(line) }, async (session) => {
      const large = Object.keys(session.models).at(-1)!;
      const draft = session.state({ program: "draft" }).system("Be brief.").user(options.prompts[0]!);
      const text = draft.gen("text");
      const judge = session.state({ model: large, program: "judge" });
      const verdict = judge.user("Is it true? ", text).gen("verdict");
      const [again] = draft.fork(1, { model: large });
      const better = again!.user("Better!").gen("better");
      const graph = new Graph({ model: large });
      const run = session.submit(graph, { outputs: [graph.root.user("Alone?").gen("alone")] });
      const variables = [text, verdict, better, ...run.variables];
      const values = await Promise.all(variables);
      const failed = session.state({ model: large }).user("?").gen("digits", { regex: "[0-9]" });
      const refused = await Promise.resolve(failed).catch((error: AgentflowError) => [error.code, error.param]);
      session.state({ program: "report" }).cancel({ failure: new RangeError("no more rows") });
      return {
        values,
        states: [draft, judge, again!].map((state) => state.model),
        costs: variables.map((variable) => variable.usage!.cost),
        total: (await session.stats()).cost,
        constraints: Object.values(session.models).map(({ constraints }) => constraints),
        refused,
        recording,
      };
    });
  },

  /** Answers to questions about the first prompt. */
  async decide(options) {
    return withSession(options, async (session) => {
      const state = session.state().user(options.prompts[0]!);
      const decisions = state.decide("decisions", [
        { name: "Is it spam?", kind: "predicate" },
        { name: "tone", kind: "choice", options: [{ text: "calm" }, { text: "angry" }] },
      ]);
      return { value: JSON.parse(await decisions), by: decisions.decidedBy, reason: decisions.finishReason };
    });
  },

  /** A watch over a generation: its steps, and the nodes that the generation has left in the tree. */
  async watch(options) {
    return withSession(options, async (session) => {
      const watch = session.watch({ intervalS: 0.1 });
      const tree = new TreeView();
      const first = (await watch.next()).value as Watched;
      tree.apply(first);
      const state = session.state({ program: "watched" });
      await state.text(options.prompts[0]!).gen("text", { maxTokens: 8 });
      let steps = 0;
      const found: Record<string, unknown> = { isReset: first.tree?.reset };
      for await (const look of watch) {
        tree.apply(look);
        steps += look.steps?.length ?? 0;
        const [root] = tree.children(0);
        if (!steps || root === undefined) continue;
        found["numTokens"] = tree.nodes.get(root)!.numTokens;
        found["peeked"] = await session.peek(root);
        found["unknown"] = await session.peek(10 ** 6).catch((error: AgentflowError) => error.code);
        break;
      }
      return { ...found, steps, hasEnded: (await watch.next()).done };
    });
  },

  /** The live graph of two branches that hang and of what needs them, and the labels of the states of the tenant. */
  async livegraph(options) {
    return withSession(options, async (session) => {
      const branches = options.prompts.map((prompt) => session.state({ program: "judges" }).text(prompt).gen("part"));
      const last = session.state().text(...branches).gen("whole");
      const graph = await session.graph();
      last.catch(() => {});
      const graphs = await session.graphs();
      return { graph, labels: graphs.map(({ states = [] }) => states.map(({ label = "" }) => label)) };
    });
  },

  /** An image, whose size in bytes is the first prompt: in a branch, in a conversation, and in a graph. */
  async image(options) {
    return withSession(options, async (session) => {
      const bytes = new Uint8Array(Number(options.prompts[0]));
      bytes.set([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
      const shown = await image(new Blob([bytes]));
      const root = session.state().user("Look: ", shown, "What is it?");
      const [branch] = root.fork(1);
      const answer = await branch!.gen("answer");
      const talk = session.state().converse(await root.messages());
      const variable = talk.gen("reply", { reply: true });
      await variable;
      const graph = new Graph();
      const value = graph.root.user(shown).gen("value");
      return [answer, variable.reply.text, await session.submit(graph).variable(value)];
    });
  },

  /** The embeddings of the prompts, at once and one alone. */
  async embed(options) {
    return withSession(options, async (session) => {
      const vectors = await session.embed(options.prompts, options.embed);
      const one = await session.embed(options.prompts[0]!, options.embed);
      return { vectors: vectors.map((vector) => [...vector]), one: [...one], none: await session.embed([]) };
    });
  },

  /** The errors of calls that cannot be, and of one that is aborted; the session goes on after each. */
  async embedErrors(options) {
    return withSession(options, async (session) => {
      const aborting = new AbortController();
      const many = Array.from({ length: 3000 }, (_, index) => `text ${index}`);
      const calls: [string | string[], EmbedOptions][] = [
        [["a", ""], {}],
        [[...many, "word ".repeat(200)], {}],
        ["a", { dimensions: 1000 }],
        ["a", { model: "unknown" }],
        ["a", { prompt: "Q: ", promptName: "query" }],
        [many, { signal: AbortSignal.abort(new Error("before")) }],
        [many, { signal: aborting.signal }],
      ];
      const found: unknown[] = [];
      for (const [texts, given] of calls) {
        const call = session.embed(texts as string[], given);
        if (given.signal === aborting.signal) aborting.abort(new Error("meanwhile")); // its first ops are sent
        found.push(await call.then(() => "done", (error: AgentflowError) => [error.code ?? error.message, error.param]));
      }
      return { found, dimensions: (await session.embed("a dog")).length };
    });
  },

  /** A constrained value and what was forced in it; the tokens of the state. */
  async forced(options) {
    return withSession(options, async (session) => {
      const state = session.state();
      const value = state.text(options.prompts[0]!).gen("value", { regex: "forced text [ab]", maxTokens: 30 });
      const tokens = state.read("tokens", "tokens");
      return { text: await value, forced: value.forced, usage: value.usage, tokens: JSON.parse(await tokens) };
    });
  },
};

async function withSession<T>(options: Options, work: (session: Session) => Promise<T>): Promise<T> {
  const { prompts: _prompts, embed: _embed, ...connecting } = options;
  const session = await connect({ WebSocket: globalThis.WebSocket ?? WebSocket, ...connecting });
  try {
    return await work(session);
  } finally {
    await session.close();
  }
}

async function collected(pieces: AsyncIterable<string>): Promise<string> {
  const found: string[] = [];
  for await (const piece of pieces) found.push(piece);
  return found.join("");
}

const [name, given] = process.argv.slice(2);
try {
  console.log(JSON.stringify({ result: await scenarios[name!]!(JSON.parse(given!) as Options) }));
} catch (error) {
  if (!(error instanceof AgentflowError)) throw error;
  const { code, message, retryAfterS } = error;
  console.log(JSON.stringify({ error: { code, message, name: error.name, retryAfterS } }));
}
