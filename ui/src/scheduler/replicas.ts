// The engine processes of models, requested again and again while the view is shown.
import { useSignalEffect } from "@preact/signals";
import { useRef, useState } from "preact/hooks";
import { fetchWithKey, session } from "../app/session";
import type { Scrape } from "./prometheus";

const INTERVAL_MS = 1000;

/** A replica as `GET /v1/replicas` has it. */
export interface Replica {
  readonly model: string;
  readonly number: number;
  readonly state: "loading" | "serving" | "trial" | "draining" | "down";
  readonly device: string;
  readonly requests: number;
  readonly running: number | null;
  readonly cached_tokens: number | null;
  readonly total_tokens: number | null;
  readonly restarts: number;
  readonly problem: string;
}

/** The replicas of all models. */
export function useReplicas(isPaused: boolean): readonly Replica[] {
  const [replicas, setReplicas] = useState<readonly Replica[]>([]);
  const paused = useRef(isPaused);
  paused.current = isPaused;
  useSignalEffect(() => {
    if (session.value === null) return;
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    const poll = async (): Promise<void> => {
      if (!paused.current && document.visibilityState === "visible") {
        const found = await look(abort.signal);
        if (abort.signal.aborted) return;
        if (found !== null) setReplicas(found);
      }
      timer = setTimeout(() => void poll(), INTERVAL_MS);
    };
    void poll();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  });
  return replicas;
}

/** null: the server does not answer now. */
async function look(signal: AbortSignal): Promise<readonly Replica[] | null> {
  try {
    const answer = await fetchWithKey("/v1/replicas", { signal });
    return answer.ok ? ((await answer.json()) as { data: Replica[] }).data : null;
  } catch {
    return null;
  }
}

/** Whether a model has several replicas, by the server's metrics. */
export function hasSeveral(scrape: Scrape): boolean {
  return scrape.values("agentflow_replica_up", "replica").length > 1;
}

/** The replicas of the models that have several. */
export function ofSeveral(replicas: readonly Replica[]): readonly Replica[] {
  const counts = new Map<string, number>();
  for (const { model } of replicas) counts.set(model, (counts.get(model) ?? 0) + 1);
  return replicas.filter(({ model }) => counts.get(model)! > 1);
}
