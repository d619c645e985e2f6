// How much of each variable and state was received.

import { countCodePoints, dropCodePoints } from "./code_points.js";
import { ProtocolError } from "./errors.js";
import {
  DECLARING,
  GRAPH_TICKET,
  type CloseOp,
  type DeltaEvent,
  type Op,
  type ReachedEvent,
  type Resume,
  type ServerEvent,
  type StateFailedEvent,
  type ValueEvent,
} from "./protocol.js";

class StateCursor {
  numUnfinished = 0; // variables
  ticket = 0; // the last one submitted
  reached = 0;
  hasFailed = false;
  isClosing = false;

  /** Whether more events of the state will arrive. */
  get isPending(): boolean {
    return this.numUnfinished > 0 || (this.reached < this.ticket && !this.hasFailed);
  }
}

interface VariableCursor {
  readonly state: number;
  numCodePoints: number;
}

/**
 * Follows the submitted ops and the received events.
 *
 * A `close` is delayed until all events of the state have arrived: after a broken connection, the server could
 * not repeat the events of a closed state.
 */
export class Cursors {
  #states = new Map<number, StateCursor>();
  #variables = new Map<number, VariableCursor>();
  #due: CloseOp[] = [];

  /** Follows an op. False if it must be delayed; `dueCloses` returns it later. */
  submit(op: Op): boolean {
    switch (op.op) {
      case "open":
        this.#states.set(op.state, new StateCursor());
        return true;
      case "submit": {
        const root = new StateCursor();
        root.ticket = GRAPH_TICKET;
        this.#states.set(op.state, root);
        for (const number of op.outputs ?? []) this.#declare(op.state, op.state + number - 1);
        return true;
      }
      case "fork":
        for (const child of op.children) this.#states.set(child, new StateCursor());
        return true;
      case "await": {
        const state = this.#states.get(op.state);
        if (state) state.ticket = op.ticket;
        return true;
      }
      case "close": {
        const state = this.#states.get(op.state);
        if (state?.isPending) {
          state.isClosing = true;
          return false;
        }
        this.#states.delete(op.state);
        return true;
      }
      default:
        if (DECLARING.has(op.op)) {
          const { state, var: number } = op as { state: number; var: number };
          this.#declare(state, number);
        }
        return true;
    }
  }

  /** Whether the server knows the state. */
  isOpen(state: number): boolean {
    return this.#states.has(state);
  }

  /** The events without the parts that were received before. Throws `ProtocolError` for a gap. */
  receive(events: readonly ServerEvent[]): ServerEvent[] {
    const found: ServerEvent[] = [];
    for (const event of events) {
      const fresh = this.#receive(event);
      if (fresh) found.push(fresh);
    }
    return found;
  }

  /** The delayed closes that may be sent now. */
  dueCloses(): CloseOp[] {
    const due = this.#due;
    this.#due = [];
    return due;
  }

  /** The positions from which the server continues. */
  resume(session: string, secret: string): Resume {
    const variables: Record<number, number> = {};
    for (const [number, variable] of this.#variables) variables[number] = variable.numCodePoints;
    const states: Record<number, number> = {};
    for (const [number, state] of this.#states) if (!state.hasFailed) states[number] = state.reached;
    return { session, secret, variables, states };
  }

  #declare(state: number, number: number): void {
    this.#variables.set(number, { state, numCodePoints: 0 });
    const cursor = this.#states.get(state);
    if (cursor) cursor.numUnfinished++;
  }

  #receive(event: ServerEvent): ServerEvent | undefined {
    switch (event.event) {
      case "delta":
        return this.#receiveText(event);
      case "value": {
        const value = this.#receiveText(event);
        this.#finish(event.var);
        return value;
      }
      case "varfailed":
        return this.#finish(event.var) ? event : undefined;
      case "reached":
      case "statefailed":
        return this.#receiveState(event) ? event : undefined;
      default:
        return event;
    }
  }

  #receiveText<E extends DeltaEvent | ValueEvent>(event: E): E | undefined {
    const variable = this.#variables.get(event.var);
    if (!variable) return undefined; // its end was received before the connection broke
    const at = variable.numCodePoints;
    if (event.at > at) {
      throw new ProtocolError(
        `the server continued variable ${event.var} at character ${event.at}, but only ${at} came before`,
      );
    }
    const text = event.at === at ? event.text : dropCodePoints(event.text, at - event.at);
    variable.numCodePoints += countCodePoints(text);
    if (!text && event.event === "delta" && !event.reasoning) return undefined;
    return event.at === at ? event : { ...event, at, text };
  }

  #finish(number: number): boolean {
    const variable = this.#variables.get(number);
    if (!variable) return false;
    this.#variables.delete(number);
    const state = this.#states.get(variable.state);
    if (state) {
      state.numUnfinished--;
      this.#closeIfDone(variable.state, state);
    }
    return true;
  }

  #receiveState(event: ReachedEvent | StateFailedEvent): boolean {
    const state = this.#states.get(event.state);
    if (!state || state.hasFailed) return false;
    if (event.event === "statefailed") {
      state.hasFailed = true;
    } else {
      if (event.ticket <= state.reached) return false;
      state.reached = event.ticket;
    }
    this.#closeIfDone(event.state, state);
    return true;
  }

  #closeIfDone(number: number, state: StateCursor): void {
    if (state.isClosing && !state.isPending) {
      this.#states.delete(number);
      this.#due.push({ op: "close", state: number });
    }
  }
}
