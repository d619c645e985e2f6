// A view's watch of the engine: from when the view is shown until it is left, across new sessions.
import { AgentflowError, Overloaded } from "agentflow-client";
import { useSignalEffect } from "@preact/signals";
import { useRef, useState } from "preact/hooks";
import { sentenceOf, session } from "./session";

export type { Watched, WatchedRequest, StepRecord, TreeDelta, TreeNode, Stats } from "agentflow-client";
import type { Watched } from "agentflow-client";

/** After this time, a server that was too busy for a watch is asked again. */
const AGAIN_S = 2;

interface Options {
  readonly steps: boolean;
  readonly tree: boolean;
  readonly graphs?: boolean;
  readonly intervalS: number;
  readonly maxNodes?: number;
}

/** Calls `receive` with each look at the engine; it returns false if it has nothing to show. Returns a sentence
 * while there is nothing new to see, else null.
 * The options count when a session begins: a component that changes them takes a new `key`. */
export function useWatch(options: Options, receive: (watched: Watched) => boolean | void): string | null {
  const [problem, setProblem] = useState<string | null>("Waiting for the engine.");
  const newest = useRef(receive);
  newest.current = receive;
  const hasSeen = useRef(false);
  useSignalEffect(() => {
    const now = session.value;
    if (now === null) {
      setProblem(hasSeen.current ? "Not connected: what is shown is from before." : "Not connected.");
      return;
    }
    const abort = new AbortController();
    void follow();
    return () => abort.abort();

    async function follow(): Promise<void> {
      while (!abort.signal.aborted) {
        try {
          for await (const watched of now!.watch({ ...options, signal: abort.signal })) {
            const error = watched.error ?? null;
            setProblem(error && "The engine is restarting: what is shown is from before.");
            if (error !== null) continue;
            hasSeen.current = newest.current(watched) !== false;
          }
          return;
        } catch (error) {
          if (abort.signal.aborted) return;
          const isOld = error instanceof AgentflowError && error.code === "protocol_error";
          setProblem(isOld ? "This server cannot be watched." : sentenceOf(error));
          if (!(error instanceof Overloaded)) return;
          await new Promise((resolve) => setTimeout(resolve, (error.retryAfterS ?? AGAIN_S) * 1000));
        }
      }
    }
  });
  return problem;
}
