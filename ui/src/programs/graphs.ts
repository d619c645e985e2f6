// The live graphs of the tenant's sessions, as a watch reports them while the view is shown.
import { GraphsView, type LiveGraph, type Watched } from "agentflow-client";
import { useRef, useState } from "preact/hooks";
import { useWatch } from "../app/watch";

/** The graph of one session. `number`: stays the same while the session is watched; 1: this page's session. */
export interface WatchedSession {
  readonly number: number;
  /** Of no other session, also after the numbers have begun again. */
  readonly key: string;
  readonly graph: LiveGraph;
}

export interface ShownGraphs {
  readonly sessions: readonly WatchedSession[];
  /** Sessions with open states that are not among them. */
  readonly numLeftOut: number;
}

/** The graphs with open states, and a sentence while there is nothing new to see. */
export function useGraphs(isPaused: boolean): { shown: ShownGraphs; problem: string | null } {
  const view = useRef(new WatchedGraphs()).current;
  const [newest, setNewest] = useState<ShownGraphs>(NOTHING);
  const shown = useRef(newest);
  if (!isPaused) shown.current = newest;
  const problem = useWatch({ steps: false, tree: false, graphs: true, intervalS: 0.5 }, (watched) => {
    view.apply(watched);
    const now = view.shown();
    setNewest(now);
    return now.sessions.length > 0;
  });
  return { shown: shown.current, problem };
}

const NOTHING: ShownGraphs = { sessions: [], numLeftOut: 0 };

/** The graphs that the deltas describe. */
export class WatchedGraphs {
  readonly #view = new GraphsView();
  #numResets = 0;
  #numLeftOut = 0;

  apply(watched: Watched): void {
    if (!watched.graphs) return;
    if (watched.graphs.reset) this.#numResets += 1;
    this.#numLeftOut = watched.graphs.num_graphs_left_out ?? 0;
    this.#view.apply(watched);
  }

  shown(): ShownGraphs {
    const sessions = [...this.#view.graphs]
      .filter(([, { states }]) => states.size > 0)
      .sort(([a], [b]) => a - b)
      .map(([number, graph]) => ({
        number,
        key: `${this.#numResets}/${number}`,
        graph: {
          states: [...graph.states.values()].sort((a, b) => a.id - b.id),
          nodes: [...graph.nodes.values()],
          num_states_left_out: graph.numStatesLeftOut,
          num_nodes_left_out: graph.numNodesLeftOut,
        },
      }));
    return { sessions, numLeftOut: this.#numLeftOut };
  }
}
