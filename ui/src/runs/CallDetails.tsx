// The call that is chosen in the timeline: its facts, and its text.
import { percent } from "../charts/numbers";
import type { Call } from "./recording";
import { factsOf } from "./words";

/** `version`: drawn again when it changes. */
export function CallDetails({ call, lastS }: { call: Call; lastS: number; version: number }) {
  return (
    <section class="panel call-details" aria-labelledby="call-name" data-testid="call-details">
      <h3 id="call-name">
        {call.kind} <bdi>{call.name}</bdi>
      </h3>
      <dl>
        {factsOf(call, lastS).map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <bdi>{value}</bdi>
            </dd>
          </div>
        ))}
      </dl>
      <div class="call-text">
        {call.error !== null && (
          <p class="call-error">
            <code>{call.error.code}</code> <bdi>{call.error.message}</bdi>
          </p>
        )}
        {call.choices !== null && <Choices choices={call.choices} />}
        {call.text !== "" && (
          <pre class="model-text" tabIndex={0} aria-label="Text">
            {call.text}
          </pre>
        )}
        {call.text === "" && call.error === null && <p class="figure-note">No text.</p>}
      </div>
    </section>
  );
}

/** The scores of a select are log-probabilities: shown as shares of their sum. */
function Choices({ choices }: { choices: Readonly<Record<string, number>> }) {
  const entries = Object.entries(choices).slice(0, 50);
  const best = Math.max(...entries.map(([, score]) => score));
  const weights = entries.map(([, score]) => Math.exp(score - best));
  const sum = weights.reduce((total, weight) => total + weight, 0);
  return (
    <ul class="call-choices">
      {entries.map(([choice], i) => {
        const share = (weights[i] ?? 0) / sum;
        return (
          <li key={choice}>
            <bdi>{choice}</bdi>
            <span class="choice-bar" aria-hidden="true">
              <span style={{ width: `${share * 100}%` }} />
            </span>
            <span>{percent(share)}</span>
          </li>
        );
      })}
    </ul>
  );
}
