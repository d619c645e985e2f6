// Stands for agentflow-client until its sources are here.
export class AgentflowError extends Error {
  constructor(
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}
export function connect(): Promise<never> {
  return Promise.reject(new AgentflowError("server_unreachable", "there is no client yet"));
}
