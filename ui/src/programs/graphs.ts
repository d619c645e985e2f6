// The live graphs of the tenant's sessions, requested again and again while the view is shown.
import type { LiveGraph } from "agentflow-client";
import { useSignalEffect } from "@preact/signals";
import { useRef, useState } from "preact/hooks";
import { sentenceOf, session } from "../app/session";

const INTERVAL_MS = 500;
const AFTER_ERROR_MS = 2000;

/** The graphs, this page's own session first, and a sentence while there is nothing new to see. */
export function useGraphs(isPaused: boolean): { graphs: readonly LiveGraph[] | null; problem: string | null } {
  const [graphs, setGraphs] = useState<readonly LiveGraph[] | null>(null);
  const [problem, setProblem] = useState<string | null>("Waiting for the server.");
  const paused = useRef(isPaused);
  paused.current = isPaused;
  const hasShown = useRef(false);
  useSignalEffect(() => {
    const now = session.value;
    if (now === null) {
      setProblem(hasShown.current ? "Not connected: what is shown is from before." : "Not connected.");
      return;
    }
    let isLeft = false;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const again = (afterMs: number): void => {
      if (!isLeft) timer = setTimeout(() => void look(), afterMs);
    };
    const look = async (): Promise<void> => {
      if (paused.current || document.hidden) return again(INTERVAL_MS);
      try {
        const found = await now.graphs();
        if (isLeft) return;
        if (!paused.current) {
          hasShown.current = found.some(({ states }) => states?.length);
          setGraphs(found);
        }
        setProblem(null);
        again(INTERVAL_MS);
      } catch (error) {
        if (!isLeft) setProblem(sentenceOf(error));
        again(AFTER_ERROR_MS);
      }
    };
    void look();
    return () => {
      isLeft = true;
      clearTimeout(timer);
    };
  });
  return { graphs, problem };
}
