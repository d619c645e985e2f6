// The scrapes of `/metrics` while the view is shown.
import { useRef, useState } from "preact/hooks";
import { fetchWithKey } from "../app/session";
import { Ring } from "../charts/ring";
import { usePolling } from "./polling";
import { parseScrape, Scrape, type Sample } from "./prometheus";

const INTERVAL_S = 2;
/** Ten minutes. */
const CAPACITY = 300;

export interface Scrapes {
  readonly all: readonly Scrape[];
  /** A sentence while `/metrics` cannot be read. `isForbidden`: this key may not see it. */
  readonly problem: string | null;
  readonly isForbidden: boolean;
}

/** Reads `/metrics` every two seconds, unless `isPaused`. */
export function useScrapes(isPaused: boolean): Scrapes {
  const ring = useRef(new Ring<Scrape>(CAPACITY));
  const [scrapes, setScrapes] = useState<Scrapes>({ all: [], problem: null, isForbidden: false });
  usePolling(isPaused, INTERVAL_S * 1000, async (signal) => {
    const next = await scrapeOnce(signal);
    if (signal.aborted) return;
    if (next instanceof Scrape) ring.current.push(next);
    setScrapes({
      all: ring.current.toArray(),
      problem: next instanceof Scrape ? null : next.problem,
      isForbidden: !(next instanceof Scrape) && next.isForbidden,
    });
  });
  return scrapes;
}

type Missing = { readonly problem: string; readonly isForbidden: boolean };

async function scrapeOnce(signal: AbortSignal): Promise<Scrape | Missing> {
  try {
    const answer = await fetchWithKey("/metrics", { signal });
    if (answer.ok) return parseScrape(await answer.text(), performance.now() / 1000);
    const isForbidden = answer.status === 401 || answer.status === 403;
    const problem = isForbidden
      ? "This key does not see the server's metrics: the numbers below are for its own requests, and tokens count once a request has finished."
      : `The server answers ${answer.status} for its metrics: the numbers below are from before.`;
    return { problem, isForbidden };
  } catch {
    return {
      problem: "The server's metrics cannot be read: the numbers below are from before.",
      isForbidden: false,
    };
  }
}

/** Counters as the `watched` events have them. */
export type StatsLike = Readonly<Record<string, unknown>>;

/** A scrape with what a session's own stats and requests say, for keys that do not see `/metrics`. Such keys get no
 * counters of the engine as a whole. */
export function scrapeOfStats(
  stats: StatsLike,
  requests: readonly { readonly status: string }[],
  atS: number,
): Scrape {
  const model = String(stats["model"] ?? "");
  const of = (name: string): number => (typeof stats[name] === "number" ? (stats[name] as number) : 0);
  const samples: Sample[] = [];
  const add = (name: string, value: number, labels: Record<string, string> = {}): void => {
    samples.push({ name: `agentflow_${name}`, labels: { model, ...labels }, value });
  };
  add("engine_up", 1);
  add("running_requests", requests.filter(({ status }) => status === "running").length);
  add("waiting_requests", requests.filter(({ status }) => status === "waiting").length);
  add("prompt_tokens_total", of("cached_tokens"), { source: "cached" }); // of prompts or outputs: not known
  add("prompt_tokens_total", of("prompt_tokens") - of("cached_tokens"), { source: "computed" });
  add("generated_tokens_total", of("generated_tokens"));
  return new Scrape(samples, atS);
}
