// The scheduler: what runs and waits now, the batch of each step, and the numbers of /metrics.
import { useRef, useState } from "preact/hooks";
import { View } from "../app/View";
import { model as chosenModel } from "../app/session";
import { useWatch, type Watched } from "../app/watch";
import { LineChart, spanOf, type Point } from "../charts/LineChart";
import { compact, count, percent } from "../charts/numbers";
import { Ring } from "../charts/ring";
import { headline, kvUse, latencies, modelsOf, rate, totals, type Figure, type KvUse } from "./figures";
import type { Scrape } from "./prometheus";
import { ReplicaTable } from "./ReplicaTable";
import { hasSeveral } from "./replicas";
import { RequestTable } from "./RequestTable";
import { grouped, type Request } from "./requests";
import { scrapeOfStats, useScrapes, type StatsLike } from "./scrapes";
import { StepLog, type Step } from "./steps";
import { StepChart } from "./StepChart";
import { QueryTip, Value } from "./Value";
import "./scheduler.css";

const MAX_STEPS = 512;
const RATE_S = 10;
const MINUTE_S = 60;

interface Look {
  readonly steps: readonly Step[];
  readonly numSkipped: number;
  readonly requests: readonly Request[];
}

export default function SchedulerView() {
  const [isPaused, setPaused] = useState(false);
  const steps = useRef(new StepLog(MAX_STEPS));
  const own = useRef(new Ring<Scrape>(300)); // from this key's stats
  const [look, setLook] = useState<Look>({ steps: [], numSkipped: 0, requests: [] });
  const problem = useWatch({ steps: true, tree: false, intervalS: 0.5 }, (watched: Watched) => {
    if (isPaused) return;
    steps.current.add(watched.steps ?? [], watched.stats?.model);
    if (watched.stats)
      own.current.push(
        scrapeOfStats(
          watched.stats as unknown as StatsLike,
          watched.requests ?? [],
          performance.now() / 1000,
        ),
      );
    setLook({
      steps: steps.current.toArray(),
      numSkipped: watched.steps_skipped ?? 0,
      requests: watched.requests ?? [],
    });
  });
  const scrapes = useScrapes(isPaused);
  const all = scrapes.isForbidden ? own.current.toArray() : scrapes.all;
  const now = all[all.length - 1];
  const models = now === undefined ? [] : modelsOf(now);
  const model = models.find((name) => name === chosenModel.value) ?? models[0] ?? "";
  return (
    <View
      name="scheduler"
      title="Scheduler"
      lead="What runs and what waits, what each forward pass computed, and how long requests took. Every number is one of the server's metrics: point at it, or focus it, to see which."
      actions={
        <button type="button" aria-pressed={isPaused} onClick={() => setPaused(!isPaused)}>
          {isPaused ? "Resume" : "Pause"}
        </button>
      }
    >
      {(scrapes.problem ?? problem) && <p class="view-note">{scrapes.problem ?? problem}</p>}
      {now !== undefined && <Numbers all={all} now={now} model={model} isOwn={scrapes.isForbidden} />}
      {!scrapes.isForbidden && now !== undefined && hasSeveral(now) && <ReplicaTable isPaused={isPaused} />}
      {!scrapes.isForbidden && (
        <section class="scheduler-part" aria-labelledby="batches">
          <h2 id="batches">Batches</h2>
          <StepChart steps={look.steps} numSkipped={look.numSkipped} />
        </section>
      )}
      <section class="scheduler-part" aria-labelledby="requests">
        <h2 id="requests">Requests</h2>
        {problem && look.requests.length === 0 ? (
          <p class="empty">Unknown until the engine answers.</p>
        ) : (
          <RequestTable groups={grouped(look.requests)} />
        )}
      </section>
      {now !== undefined && (
        <>
          {!scrapes.isForbidden && <Latencies all={all} now={now} model={model} />}
          <Totals now={now} model={model} isOwn={scrapes.isForbidden} />
        </>
      )}
      <QueryTip />
    </View>
  );
}

interface NumbersProps {
  readonly all: readonly Scrape[];
  readonly now: Scrape;
  readonly model: string;
  /** The numbers are of this key's requests only: those of the whole engine are missing. */
  readonly isOwn: boolean;
}

function Numbers({ all, now, model, isOwn }: NumbersProps) {
  const shown = known(headline(now, older(all, now, RATE_S), model), isOwn);
  const kv = kvUse(now, model);
  const over = (of: (scrape: Scrape, before: Scrape | undefined) => number | null): Point[] =>
    all.map((scrape, i) => ({ atS: scrape.atS, value: of(scrape, all[i - 1]) }));
  const perSecond = (metric: string): Point[] =>
    over((scrape, before) => (before === undefined ? null : rate(scrape, before, metric, { model })));
  const gauge = (metric: string): Point[] => over((scrape) => scrape.sum(metric, { model }));
  const chart = { nowS: now.atS, spanS: spanOf(all) };
  return (
    <>
      <dl class="figures">
        {shown.map((figure) => (
          <FigureCard key={figure.name} figure={figure} />
        ))}
      </dl>
      {kv !== null && <KvBar use={kv} />}
      <div class="charts">
        <LineChart
          {...chart}
          title="Tokens per second"
          format={compact}
          least={10}
          series={[
            {
              name: "generated",
              look: "a",
              points: perSecond("agentflow_generated_tokens_total"),
              isArea: true,
            },
            ...(isOwn
              ? []
              : [
                  {
                    name: "computed",
                    look: "b" as const,
                    points: perSecond("agentflow_computed_tokens_total"),
                  },
                ]),
          ]}
        />
        <LineChart
          {...chart}
          title="Requests"
          format={compact}
          least={4}
          isWhole
          series={[
            { name: "running", look: "a", points: gauge("agentflow_running_requests"), isArea: true },
            { name: "waiting", look: "b", points: gauge("agentflow_waiting_requests") },
          ]}
        />
      </div>
    </>
  );
}

function known(figures: readonly Figure[], isOwn: boolean): readonly Figure[] {
  return isOwn ? figures.filter(({ value }) => value !== null) : figures;
}

/** The newest scrape that is at least `ageS` older than `now`, else the oldest one; null if there is only one. */
function older(all: readonly Scrape[], now: Scrape, ageS: number): Scrape | null {
  for (let i = all.length - 2; i >= 0; i--) {
    const scrape = all[i] as Scrape;
    if (now.atS - scrape.atS >= ageS || i === 0) return scrape;
  }
  return null;
}

function FigureCard({ figure }: { figure: Figure }) {
  return (
    <div class="figure panel">
      <dt>{figure.name}</dt>
      <dd>
        <Value figure={figure} />
        {figure.note && <span class="figure-note">{figure.note}</span>}
      </dd>
    </div>
  );
}

function KvBar({ use }: { use: KvUse }) {
  const pool = Math.max(1, use.inUse + use.cached + use.free);
  const parts = [
    { name: "in use", value: use.inUse, kind: "in-use" },
    { name: "cached", value: use.cached, kind: "cached" },
    { name: "free", value: use.free, kind: "free" },
  ];
  return (
    <figure class="kv panel">
      <figcaption>
        <span class="chart-title">KV pool</span>
        {parts.map(({ name, value, kind }) => (
          <span key={kind} class="kv-key">
            <span class={`kv-swatch kv-${kind}`} aria-hidden="true" />
            {name} <strong>{count(value)}</strong> ({percent(value / pool)})
          </span>
        ))}
        <span class="chart-note kv-query">agentflow_kv_tokens, by state</span>
      </figcaption>
      <div class="kv-bar" aria-hidden="true">
        {parts.map(({ kind, value }) => (
          <span key={kind} class={`kv-part kv-${kind}`} style={{ flexGrow: value }} />
        ))}
      </div>
    </figure>
  );
}

function Latencies({ all, now, model }: { all: readonly Scrape[]; now: Scrape; model: string }) {
  const [isRecent, setRecent] = useState(false);
  const before = isRecent ? older(all, now, MINUTE_S) : null;
  const shown = latencies(now, before, model);
  return (
    <section class="scheduler-part" aria-labelledby="latencies">
      <div class="part-head">
        <h2 id="latencies">Latencies</h2>
        <select
          aria-label="Observations"
          value={isRecent ? "recent" : "all"}
          onChange={(event) => setRecent(event.currentTarget.value === "recent")}
        >
          <option value="all">since the server started</option>
          <option value="recent">of the last minute</option>
        </select>
      </div>
      <div class="table-frame panel" tabIndex={0} role="region" aria-label="Percentiles of latencies">
        <table>
          <thead>
            <tr>
              <th scope="col">Time</th>
              <th scope="col">Requests</th>
              {(shown[0]?.percentiles ?? []).map(({ name }) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
              <th scope="col">Mean</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((latency) => (
              <tr key={latency.name}>
                <th scope="row">
                  {latency.name} <span class="figure-note">{latency.meaning}</span>
                </th>
                {[latency.number, ...latency.percentiles, latency.mean].map((figure) => (
                  <td key={figure.name}>
                    <Value figure={figure} />
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Totals({ now, model, isOwn }: Omit<NumbersProps, "all">) {
  return (
    <section class="scheduler-part" aria-labelledby="totals">
      <h2 id="totals">Since the server started</h2>
      <dl class="facts totals panel">
        {known(totals(now, model), isOwn).map((figure) => (
          <div key={figure.name}>
            <dt>{figure.name}</dt>
            <dd>
              <Value figure={figure} />
            </dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
