"""The carrier: one process per host, which joins the host to the others of an instance.

    first host     orchestrator, gateways <──> near end ══ TLS ══ far end <──> agent, anchor, workers     joined host

Neither side sees a difference. To the orchestrator the near end is supervisor and anchor of the other hosts, to the
gateways it is their workers; to the agent of its host (procs/agent.py) the far end is orchestrator and gateways.

    key.py         the certificate that lets hosts into an instance
    frames.py      what goes over the link, and its form
    greeting.py    the first frame, and why one is refused
    resend.py      what was sent and not acknowledged is sent again, on the next connection
    tls.py         frames over one connection that never blocks
    notes.py       what stands for memory of another host: a descriptor with its name in it
    sockets.py     local sockets whose bytes go over the link
    near.py        all joined hosts, on the first host
    remote_host.py one of them, as the near end has it
    far.py         this host, joined to another
"""
