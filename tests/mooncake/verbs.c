/* A libibverbs.so.1 that says "no devices": for tests of Mooncake over TCP on machines that lack the real one. Whatever
 * is called beyond the list of devices means that somebody has believed in one: the process ends there. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static void *no_devices[1];

void **ibv_get_device_list(int *num_devices) {
    if (num_devices) *num_devices = 0;
    return no_devices;
}

void ibv_free_device_list(void **list) { (void)list; }

int ibv_fork_init(void) { return 0; }

#define UNREACHABLE(name)                                                      \
    void name(void) {                                                          \
        fputs(#name " was called, and there is no device\n", stderr);          \
        abort();                                                               \
    }

UNREACHABLE(ibv_create_comp_channel)
UNREACHABLE(ibv_destroy_comp_channel)
UNREACHABLE(ibv_ack_async_event)
UNREACHABLE(ibv_ack_cq_events)
UNREACHABLE(ibv_alloc_pd)
UNREACHABLE(ibv_close_device)
UNREACHABLE(ibv_create_cq)
UNREACHABLE(ibv_create_qp)
UNREACHABLE(ibv_dealloc_pd)
UNREACHABLE(ibv_dereg_mr)
UNREACHABLE(ibv_destroy_cq)
UNREACHABLE(ibv_destroy_qp)
UNREACHABLE(ibv_event_type_str)
UNREACHABLE(ibv_get_async_event)
UNREACHABLE(ibv_get_cq_event)
UNREACHABLE(ibv_get_device_name)
UNREACHABLE(ibv_modify_qp)
UNREACHABLE(ibv_open_device)
UNREACHABLE(ibv_query_device)
UNREACHABLE(ibv_query_gid)
UNREACHABLE(ibv_query_port)
UNREACHABLE(ibv_query_qp)
UNREACHABLE(ibv_reg_mr)
UNREACHABLE(ibv_wc_status_str)
UNREACHABLE(ibv_reg_mr_iova2)
UNREACHABLE(_ibv_query_gid_ex)
