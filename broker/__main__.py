"""``python -m broker``: the broker of a run."""


from broker.server import Server, open_router, open_service
from broker.service import Service
from common.preflight import save_config_if_new
from common.roles import Role, end_process, run_role


def main(role: Role) -> None:
    """Until the run is stopped."""
    service = open_service(role.config, role.control, role.run_dir, begun=role.begun, log=role.log)
    save_config_if_new(role.config, role.run_dir)
    router = open_router(service)
    try:
        counters = service.ledger.counters
        role.control.register("broker", role.name, address=router.address, version=counters.version, state="serves")
        role.log.info("serves at %s: step %d, version %d", router.address, counters.step, counters.version)
        shown = counters.version

        def show_version(service: Service) -> None:
            nonlocal shown
            if service.ledger.counters.version != shown:
                shown = service.ledger.counters.version
                role.control.update(version=shown)

        Server(service, router).run(role.stop, show_version)
    finally:
        router.close()
        service.store.close()


if __name__ == "__main__":
    end_process(run_role(main, "broker"))
