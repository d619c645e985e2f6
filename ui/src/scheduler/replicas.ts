// The engine processes of models, requested again and again while the view is shown.
import { useState } from "preact/hooks";
import { fetchWithKey } from "../app/session";
import { usePolling } from "./polling";
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

/** The replicas of all models, as `GET /v1/replicas` has them. */
export interface Replicas {
  readonly data: readonly Replica[];
  /** The key may replace their processes. */
  readonly may_drain: boolean;
}

/** The replicas of all models. */
export function useReplicas(isPaused: boolean): Replicas {
  const [replicas, setReplicas] = useState<Replicas>({ data: [], may_drain: false });
  usePolling(isPaused, INTERVAL_MS, async (signal) => {
    const found = await look(signal);
    if (found !== null && !signal.aborted) setReplicas(found);
  });
  return replicas;
}

/** null: the server does not answer now. */
async function look(signal: AbortSignal): Promise<Replicas | null> {
  try {
    const answer = await fetchWithKey("/v1/replicas", { signal });
    return answer.ok ? ((await answer.json()) as Replicas) : null;
  } catch {
    return null;
  }
}

/** Asks for a new process of a replica. Returns why that is refused; null: it begins. */
export async function drain({ model, number }: Replica): Promise<string | null> {
  try {
    const query = new URLSearchParams({ model });
    const answer = await fetchWithKey(`/v1/replicas/${number}/drain?${query}`, { method: "POST" });
    if (answer.ok) return null;
    const { error } = (await answer.json()) as { error?: { message?: string } };
    return error?.message ?? `the server answers with the status ${answer.status}`;
  } catch {
    return "the server does not answer";
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
