// The replicas of models that have several, and a button to replace the process of one.
import { useState } from "preact/hooks";
import { announce } from "../app/announce";
import { Dialog } from "../app/Dialog";
import { count, NONE, percent } from "../charts/numbers";
import { drain, ofSeveral, useReplicas, type Replica } from "./replicas";

const STATES: Readonly<Record<Replica["state"], string>> = {
  loading: "It has no process that runs requests",
  serving: "It gets requests",
  trial: "It runs a request alone that may have crashed others",
  draining: "It gets no requests, and is replaced when those that it has have ended",
  down: "Its process died several times in a row, and is started again at growing intervals",
};
const COLUMNS = ["State", "Device", "Requests", "Running", "Cached", "Restarts"];

export function ReplicaTable({ isPaused }: { isPaused: boolean }) {
  const { data, may_drain: mayDrain } = useReplicas(isPaused);
  const [chosen, choose] = useState<Replica | null>(null);
  const [refusal, setRefusal] = useState("");
  const shown = ofSeveral(data);
  if (shown.length === 0) return null;
  const hasModels = new Set(shown.map(({ model }) => model)).size > 1;
  const nameOf = ({ model, number }: Replica): string =>
    hasModels ? `replica ${number} of ${model}` : `replica ${number}`;
  const drainChosen = async (replica: Replica): Promise<void> => {
    choose(null);
    const why = await drain(replica);
    setRefusal(why === null ? "" : `${nameOf(replica)} is not drained: ${why}.`);
    announce(why === null ? `The drain of ${nameOf(replica)} begins.` : `Not drained: ${why}.`);
  };
  return (
    <section class="scheduler-part" aria-labelledby="replicas">
      <h2 id="replicas">Replicas</h2>
      <div class="table-frame panel" tabIndex={0} role="region" aria-label="Replicas of models">
        <table>
          <thead>
            <tr>
              <th scope="col">Replica</th>
              {COLUMNS.map((name) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
              {mayDrain && <th scope="col">Update</th>}
            </tr>
          </thead>
          <tbody>
            {shown.map((replica) => (
              <tr key={`${replica.number} ${replica.model}`}>
                <th scope="row">
                  {replica.number}
                  {hasModels && (
                    <span class="figure-note">
                      {" "}
                      of <bdi>{replica.model}</bdi>
                    </span>
                  )}
                </th>
                <td>
                  <span class={`replica-state is-${replica.state}`} title={STATES[replica.state]}>
                    {replica.state}
                  </span>
                </td>
                <td>
                  <bdi>{replica.device || NONE}</bdi>
                </td>
                <td>{count(replica.requests)}</td>
                <td>{replica.running === null ? NONE : count(replica.running)}</td>
                <td>
                  <Cached replica={replica} />
                </td>
                <td>{count(replica.restarts)}</td>
                {mayDrain && (
                  <td>
                    <button
                      type="button"
                      class="small"
                      aria-label={`Drain ${nameOf(replica)}`}
                      disabled={replica.state !== "serving"}
                      onClick={() => choose(replica)}
                    >
                      Drain
                    </button>
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {shown
        .filter(({ problem }) => problem !== "")
        .map(({ model, number, problem }) => (
          <p key={`${number} ${model}`} class="view-note is-problem">
            {problem}
          </p>
        ))}
      {refusal !== "" && <p class="view-note is-problem">{refusal}</p>}
      <Dialog
        title={chosen === null ? "Drain" : `Drain ${nameOf(chosen)}`}
        isOpen={chosen !== null}
        onClose={() => choose(null)}
      >
        <p>
          The replica gets a new process, which loads the model again. No request is lost: new ones go to the other
          replicas, and those that it has may end within 30 seconds, or continue there.
        </p>
        <div class="row end">
          <button type="button" class="primary" onClick={() => chosen && void drainChosen(chosen)}>
            Drain
          </button>
        </div>
      </Dialog>
    </section>
  );
}

function Cached({ replica: { cached_tokens: cached, total_tokens: total } }: { replica: Replica }) {
  if (cached === null || total === null) return <>{NONE}</>;
  return (
    <>
      {count(cached)} of {count(total)}{" "}
      <span class="figure-note">{percent(total === 0 ? null : cached / total)}</span>
    </>
  );
}
